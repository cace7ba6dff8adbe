"""mmpretrain's XCiT as a detector's backbone, with conditioned tokens."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

from mmcv.cnn import build_norm_layer
from mmengine.model import ModuleList
from mmpretrain.models.backbones.xcit import XCiT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...arguments import check_flag, check_integer, check_integers, shown
from ...checkpoints import MIN_MATCHED, install_checkpoint_reader
from ...conditioning import TokenConditioner
from ...registry import register
from ..arguments import check_arguments, check_heads, stock_arguments
from .install import install_conditioner
from .layers import depth_of, statistics_kept

ARCHS = {
    'tiny-12': dict(embed_dims=192, depth=12, num_heads=4, layer_scale_init_value=1.0),
    'small-12': dict(embed_dims=384, depth=12, num_heads=8, layer_scale_init_value=1.0),
    'small-24': dict(
        embed_dims=384, depth=24, num_heads=8, layer_scale_init_value=1e-5
    ),
    'medium-24': dict(
        embed_dims=512, depth=24, num_heads=8, layer_scale_init_value=1e-5
    ),
}


@register('MODELS')
class CondTokXCiT(XCiT):
    """XCiT (arXiv 2106.09681) for detection whose embedded tokens are conditioned.

    mmpretrain's class with a conditioner behind its patch embedding, and XCiT's four
    levels for detection behind four of its blocks, ``levels``. All other parameters
    and state-dict keys are the stock ones. What no level comes from, such as the class
    attention, is kept for checkpoints but neither run nor trained.

    Args:
        arch (str | dict): 'tiny-12', 'small-12', 'small-24' or 'medium-24', or a dict
            of embed_dims, depth, num_heads and layer_scale_init_value. Defaults to
            'small-12'.
        patch_size (int): Patch size in pixels, 16 or 8. Defaults to 16.
        out_indices (Sequence[int], optional): The four blocks, in order, that the
            levels come from. Defaults to None, which are those at a third, half, two
            thirds and the end of the depth.
        frozen_stages (int): -1 freezes nothing more, 0 the embeddings, k the first k
            blocks too. Defaults to -1.
        bn_norm_cfg (dict): Batch norm of patch embedding, blocks and levels. Defaults
            to ``dict(type='BN')``.
        with_cp (bool): Recompute the blocks in the backward pass, to save memory.
            Defaults to False.
        conditioner (dict | TokenConditioner, optional): Arguments of
            :class:`condtok_mm.conditioning.TokenConditioner`. Defaults to None, which
            leaves the tokens as they are.
        min_matched (float): Least share of the backbone's keys that a checkpoint must
            have, in [0, 1]. Defaults to 0.9.
        **kwargs: Further keyword arguments of ``mmpretrain.models.XCiT``, other than
            out_type.

    Raises:
        TypeError: If an argument, or one of the conditioner, has a wrong type or name.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        arch: str | dict = 'small-12',
        patch_size: int = 16,
        out_indices: Sequence[int] | None = None,
        frozen_stages: int = -1,
        bn_norm_cfg: dict = dict(type='BN'),
        with_cp: bool = False,
        conditioner: dict | TokenConditioner | None = None,
        min_matched: float = MIN_MATCHED,
        **kwargs,
    ) -> None:
        if not isinstance(arch, dict):
            if not isinstance(arch, str) or arch not in ARCHS:
                raise ValueError(
                    f'arch must be one of {", ".join(ARCHS)} or a dict, but got '
                    f'{shown(arch)}.'
                )
            arch = ARCHS[arch]
        if unknown := sorted(set(map(str, arch)) - set(ARCHS['tiny-12'])):
            raise ValueError(
                f'arch has the unknown {unknown}; its keys are '
                f'{", ".join(ARCHS["tiny-12"])}.'
            )
        check_arguments(arch, 'arch.')
        if repeated := sorted({'out_type', *arch} & set(kwargs)):
            raise TypeError(f'CondTokXCiT takes no {", ".join(repeated)} beside arch.')
        stock = dict(
            patch_size=patch_size,
            out_type='featmap',
            out_indices=(),
            bn_norm_cfg=bn_norm_cfg,
        )
        stock |= dict(frozen_stages=frozen_stages, **arch, **kwargs)
        _check(stock_arguments(XCiT, (), stock), with_cp)
        super().__init__(**stock)
        depth = len(self.xca_layers)
        self.out_indices = _out_indices(out_indices, depth)
        self.with_cp = with_cp
        self.levels = _levels(self.embed_dims, patch_size, bn_norm_cfg)
        self._freeze_stages()
        install_conditioner(self, conditioner)
        install_checkpoint_reader(self, min_matched, new=r'^levels\.')

    def train(self, mode: bool = True) -> 'CondTokXCiT':
        """Set training mode, frozen stages excepted.

        Args:
            mode (bool): Training (True) or evaluation. Defaults to True.

        Returns:
            CondTokXCiT: The module, which mmpretrain's class does not return.
        """
        super().train(mode)
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Depth of a parameter, for layer-wise learning-rate decay.

        Args:
            param_name (str): Name of the parameter.
            prefix (str): What the names of the backbone's parameters begin with.
                Defaults to ''.

        Returns:
            tuple[int, int]: The depth, 0 for the embeddings, and the number of depths;
            the levels, the class attention, which is not trained, and what is outside
            the backbone have the last one.
        """
        embeddings = ('patch_embed.', 'pos_embed.', 'cls_token')
        blocks = len(self.xca_layers)
        return depth_of(param_name, prefix, embeddings, 'xca_layers.', blocks)

    def _freeze_stages(self) -> None:
        """Freeze the first stages, and what no level comes from."""
        self.cls_token.requires_grad_(False)
        names = ['ca_layers', 'norm']
        blocks = [*self.xca_layers[self.out_indices[-1] + 1 :]]
        if self.frozen_stages >= 0:
            names += ['patch_embed', 'pos_embed', 'pos_drop']
            blocks += self.xca_layers[: self.frozen_stages]
        children = (child for name, child in self.named_children() if name in names)
        for module in chain(children, blocks):
            module.eval()
            module.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Extract features.

        Args:
            images (Tensor): Normalised images. Has shape (B, C, H, W).

        Returns:
            tuple[Tensor, ...]: Maps (B, D, h, w) at strides 4, 8, 16 and 32. The sides
            of the token grid are rounded up, as is every halving of it.
        """
        x, grid = self.patch_embed(images)
        if self.use_pos_embed:
            x = x + self.pos_embed(1, *grid).flatten(2).mT
        x = self.pos_drop(x)
        outs = []
        for index, layer in enumerate(self.xca_layers):
            if self.with_cp and x.requires_grad:
                context = partial(_contexts, layer)
                x = checkpoint(layer, x, *grid, use_reentrant=False, context_fn=context)
            else:
                x = layer(x, *grid)
            if index in self.out_indices:
                level = self.levels[len(outs)]
                outs.append(level(self._format_output(x, grid, False)))
            if len(outs) == len(self.levels):
                break
        return tuple(outs)


def _levels(channels: int, patch_size: int, norm_cfg: dict) -> ModuleList:
    """From maps at the stride of the patches to strides 4, 8, 16 and 32."""

    def double() -> nn.Module:
        return nn.ConvTranspose2d(channels, channels, 2, stride=2)

    if patch_size == 8:
        pools = [nn.MaxPool2d(side, ceil_mode=True) for side in (2, 4)]
        return ModuleList([double(), nn.Identity(), *pools])
    norm = build_norm_layer(norm_cfg, channels)[1]
    quadruple = nn.Sequential(double(), norm, nn.GELU(), double())
    halve = nn.MaxPool2d(2, ceil_mode=True)
    return ModuleList([quadruple, double(), nn.Identity(), halve])


def _out_indices(indices: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    if indices is None:
        indices = (depth // 3 - 1, depth // 2 - 1, 2 * depth // 3 - 1, depth - 1)
    check_integers('out_indices', indices, 0, depth - 1, length=4)
    wanted = tuple(indices)
    if list(wanted) != sorted(set(wanted)):
        raise ValueError(
            f'out_indices must be four blocks of 0 to {depth - 1} in order, but got '
            f'{wanted}.'
        )
    return wanted


def _check(arguments: dict, with_cp: bool) -> None:
    """Raise unless arguments of the stock class go together."""
    check_flag('with_cp', with_cp)
    check_integer('arch.embed_dims', arguments['embed_dims'], 8)
    check_integer('arch.num_heads', arguments['num_heads'], 1)
    if arguments['patch_size'] not in (8, 16):
        raise ValueError(
            f'patch_size must be 16 or 8, but got {arguments["patch_size"]}.'
        )
    check_integer('frozen_stages', arguments['frozen_stages'], -1, arguments['depth'])
    check_heads(arguments['embed_dims'], arguments['num_heads'])


def _contexts(block: nn.Module) -> tuple[AbstractContextManager, ...]:
    """Contexts to compute a block in, first and again in the backward pass."""
    return nullcontext(), statistics_kept(block)
