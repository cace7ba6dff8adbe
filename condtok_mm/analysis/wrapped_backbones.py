"""Every stock backbone that CondTok conditions, small, and what it does to each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mmcv
import numpy as np
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from ..conditioning.attach import conditioned_layer
from ..models import CondTok
from .token_conditioning import TokenReport, measure_tokens

SIDE = 224
"""Pixels of a side of the images: what most of these backbones are made for."""
MEAN = np.array([123.675, 116.28, 103.53])
STD = np.array([58.395, 57.12, 57.375])

_VIT = dict(
    arch=dict(embed_dims=192, num_layers=2, num_heads=3, feedforward_channels=384),
    img_size=SIDE,
)
_TWINS = dict(
    embed_dims=[64, 128, 256, 512],
    depths=[1, 1, 1, 1],
    num_heads=[1, 2, 4, 8],
    patch_sizes=[4, 2, 2, 2],
    strides=[4, 2, 2, 2],
    mlp_ratios=[2, 2, 2, 2],
    sr_ratios=[8, 4, 2, 1],
)
_STAGES = dict(embed_dims=96, depths=[1, 1, 1, 1], num_heads=[3, 6, 12, 24])
_EVERY_TOKEN = dict(conditioner=dict(pad_value=None))


def _case(kind: str, wrapper: dict | None = None, **kwargs) -> dict:
    return dict(backbone=dict(type=kind, **kwargs), **(wrapper or {}))


WRAPPED = (
    _case('mmdet.PyramidVisionTransformer', num_layers=[1, 1, 1, 1]),
    _case('mmdet.PyramidVisionTransformerV2', num_layers=[1, 1, 1, 1]),
    _case('mmdet.SwinTransformer', depths=(1, 1, 1, 1)),
    _case('mmpretrain.BEiTViT', patch_size=16, **_VIT),
    _case('mmpretrain.DaViT', arch=_STAGES),
    _case('mmpretrain.DeiT3', patch_size=16, **_VIT),
    _case('mmpretrain.DistilledVisionTransformer', patch_size=16, **_VIT),
    _case('mmpretrain.EfficientFormer', arch='l1'),
    _case('mmpretrain.LeViT', arch='128s'),
    _case('mmpretrain.MAEViT', patch_size=16, **_VIT),
    _case('mmpretrain.MixMIMTransformer', arch=_STAGES),
    _case(
        'mmpretrain.MlpMixer',
        arch=dict(
            embed_dims=512, num_layers=2, tokens_mlp_dims=256, channels_mlp_dims=1024
        ),
    ),
    _case('mmpretrain.MoCoV3ViT', patch_size=16, **_VIT),
    _case(
        'mmpretrain.MViT',
        arch=dict(embed_dims=96, num_layers=4, num_heads=1, downscale_indices=[1, 2]),
    ),
    _case('mmpretrain.PCPVT', arch=_TWINS),
    _case('mmpretrain.PoolFormer', arch='s12'),
    _case(
        'mmpretrain.RepMLPNet',
        arch=dict(
            channels=[32, 64, 128, 256],
            depths=[1, 1, 1, 1],
            sharesets_nums=[1, 4, 32, 128],
        ),
    ),
    _case('mmpretrain.RevVisionTransformer', **_VIT),
    _case('mmpretrain.RIFormer', arch='s12'),
    _case('mmpretrain.SVT', arch=_TWINS | dict(window_sizes=[7, 7, 7, 7])),
    _case('mmpretrain.SwinTransformer', arch=_STAGES, img_size=SIDE),
    _case(
        'mmpretrain.SwinTransformerV2',
        arch=_STAGES | dict(extra_norm_every_n_blocks=0),
        img_size=SIDE,
        window_size=7,
    ),
    _case('mmpretrain.T2T_ViT', num_layers=2),
    _case('mmpretrain.TinyViT', arch='5m'),
    _case('mmpretrain.VAN', arch='tiny'),
    _case('mmpretrain.ViTEVA02', patch_size=16, **_VIT),
    _case(
        'mmpretrain.ViTSAM',
        arch=_VIT['arch'] | dict(global_attn_indexes=[1]),
        img_size=SIDE,
    ),
    _case('mmpretrain.VisionTransformer', patch_size=16, **_VIT),
    _case('mmpretrain.XCiT', embed_dims=192, depth=2, num_heads=4, img_size=SIDE),
    _case(
        'mmpretrain.HiViT',
        _EVERY_TOKEN,
        arch=dict(embed_dims=384, depths=[1, 1, 8], num_heads=6),
    ),
    _case(
        'mmpretrain.Conformer',
        _EVERY_TOKEN | dict(embed='trans_patch_conv'),
        arch=dict(embed_dims=96, channel_ratio=1, num_heads=3, depths=12),
        base_channels=16,
    ),
    _case(
        'mmpretrain.TNT',
        _EVERY_TOKEN | dict(embed='norm2_proj'),
        arch=dict(
            embed_dims_outer=384,
            embed_dims_inner=24,
            num_layers=2,
            num_heads_outer=6,
            num_heads_inner=4,
        ),
    ),
)
"""Arguments of CondTok without kappa and floor: stock backbones of mmdet and mmpretrain
that have a patch embedding, made small."""


@dataclass
class WrappedReport:
    """One backbone under CondTok, on one image.

    Attributes:
        backbone (str): Its class.
        library (str): Where it is registered.
        image (str): The image.
        embed (str): Dotted name of the layer that is conditioned.
        off_is_stock (bool): Whether ``conditioner=None`` and strength 0 give the output
            of the stock backbone with the same weights, bit for bit.
        num_tokens (int): Tokens N.
        channels (int): Channels D.
        rank (int): Numerical rank r of X.
        kappa_before (float): s_1 / s_r of X (dimensionless).
        kappa_exact (float): The same of X + C with ``kappa=2, floor=0``, over the rank
            of X (dimensionless).
        kappa_floor (float): The same with ``floor=0.1``, over the directions of X of at
            least 0.1 s_1 (dimensionless).
    """

    backbone: str
    library: str
    image: str
    embed: str
    off_is_stock: bool
    num_tokens: int
    channels: int
    rank: int
    kappa_before: float
    kappa_exact: float
    kappa_floor: float


@torch.no_grad()
def measure_wrapped(case: dict, image: Tensor, name: str = '') -> WrappedReport:
    """Measure one backbone under CondTok, against the stock one.

    Args:
        case (dict): One of :data:`WRAPPED`.
        image (Tensor): Normalised image. Has shape (1, 3, H, W).
        name (str): What to call it. Defaults to ''.

    Returns:
        WrappedReport: The report.
    """
    library, _, kind = case['backbone']['type'].partition('.')
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(library):
        stock = MODELS.build(case['backbone'])
    stock.eval()
    off = _same(stock, case, None)
    exact, floor = _same(stock, case, 0.0), _same(stock, case, 0.1)
    expected = run_seeded(stock, image)
    exact.conditioner.strength = 0
    off_is_stock = all(
        _equal(run_seeded(wrapped, image), expected) for wrapped in (off, exact)
    )
    exact.conditioner.strength = 1
    report = embedding_report(exact, image)
    layer = conditioned_layer(exact)
    return WrappedReport(
        backbone=kind,
        library=library,
        image=name,
        embed=next(key for key, child in exact.named_modules() if child is layer),
        off_is_stock=off_is_stock,
        num_tokens=report.num_tokens,
        channels=report.channels,
        rank=report.rank,
        kappa_before=report.kappa_before,
        kappa_exact=report.kappa_after,
        kappa_floor=embedding_report(floor, image).kappa_above_floor,
    )


def embedding_report(backbone: nn.Module, image: Tensor) -> TokenReport:
    """Measure the tokens behind a conditioned layer, wherever in the backbone it is.

    Args:
        backbone (nn.Module): A backbone with a conditioner.
        image (Tensor): Normalised image. Has shape (1, 3, H, W).

    Returns:
        TokenReport: The report.
    """
    inputs = []
    handle = conditioned_layer(backbone).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0])
    )
    run_seeded(backbone, image)
    handle.remove()
    return measure_tokens(backbone, inputs[0])


def run_seeded(backbone: nn.Module, image: Tensor) -> list[Tensor]:
    """Run a backbone; masks and what else is drawn are the same at each call.

    Args:
        backbone (nn.Module): The backbone.
        image (Tensor): Normalised image. Has shape (1, 3, H, W).

    Returns:
        list[Tensor]: Its outputs.
    """
    torch.manual_seed(0)
    return list(_tensors(backbone(image)))


def load_square(path: str | Path) -> Tensor:
    """Load an image, squeezed to :data:`SIDE` pixels a side and normalised.

    Args:
        path (str | Path): The file.

    Returns:
        Tensor: Image (1, 3, H, W), RGB.

    Raises:
        OSError: If it cannot be read.
    """
    image = mmcv.imread(path)
    if image is None:
        raise OSError(f'{path} is not an image.')
    image = mmcv.imnormalize(mmcv.imresize(image, (SIDE, SIDE)), MEAN, STD)
    return torch.from_numpy(image).permute(2, 0, 1)[None]


def _same(stock: nn.Module, case: dict, floor: float | None) -> nn.Module:
    """The backbone under CondTok with the weights of the stock one."""
    conditioner = None
    if floor is not None:
        conditioner = dict(kappa=2.0, floor=floor) | case.get('conditioner', {})
    wrapped = CondTok(**case | dict(conditioner=conditioner))
    # SwinTransformerV2 leaves constant buffers out of its state.
    wrapped.load_state_dict(stock.state_dict(), strict=False)
    wrapped.eval()
    return wrapped


def _tensors(output) -> Iterator[Tensor]:
    if torch.is_tensor(output):
        yield output
    elif output is not None:
        for part in output:
            yield from _tensors(part)


def _equal(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
