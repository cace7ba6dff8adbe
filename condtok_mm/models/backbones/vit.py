"""The plain vision transformer for detection, with conditioned tokens."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks.transformer import FFN, PatchEmbed
from mmengine.model import BaseModule, ModuleList
from mmengine.model.weight_init import constant_init, trunc_normal_, trunc_normal_init
from mmengine.utils import to_2tuple
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...arguments import check_integer, check_integers, shown
from ...checkpoints import MIN_MATCHED, install_checkpoint_reader
from ...checkpoints.resizing import resize_absolute_positions
from ...conditioning import TokenConditioner
from ...registry import register
from ..arguments import check_arguments, check_heads, check_init_cfg
from .cpu_kernels import GridAttention, usable
from .install import install_conditioner
from .layers import ChunkedFFN, ScaledDropPath, depth_of
from .positions import relative_positions
from .windows import from_windows, to_windows, window_plan

ARCHS = {
    'tiny': dict(embed_dims=192, num_layers=12, num_heads=3),
    'small': dict(embed_dims=384, num_layers=12, num_heads=6),
    'base': dict(embed_dims=768, num_layers=12, num_heads=12),
    'large': dict(embed_dims=1024, num_layers=24, num_heads=16),
}
ARCH_KEYS = (
    'embed_dims',
    'num_layers',
    'num_heads',
    'feedforward_channels',
    'global_attn_indexes',
)


class Attention(BaseModule):
    """Multi-head self-attention over a map of tokens.

    Decomposed relative positions (ViTDet, after MViTv2) are linear in the query. They
    ride on extra channels of query and key, so that no N x N bias is made.

    Args:
        embed_dims (int): Channels D.
        num_heads (int): Heads.
        qkv_bias (bool): Bias on query, key and value. Defaults to True.
        rel_pos_hw (tuple[int, int], optional): Rows and columns that the relative
            position tables are made for. Defaults to None, which makes none.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool = True,
        rel_pos_hw: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        head_dims = embed_dims // num_heads
        self.scale = head_dims**-0.5
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.use_rel_pos = rel_pos_hw is not None
        if self.use_rel_pos:
            rows, columns = rel_pos_hw
            self.rel_pos_h = nn.Parameter(torch.zeros(2 * rows - 1, head_dims))
            self.rel_pos_w = nn.Parameter(torch.zeros(2 * columns - 1, head_dims))

    def forward(self, x: Tensor, hw: tuple[int, int], window: int = 0) -> Tensor:
        """Attend.

        Args:
            x (Tensor): Tokens. Has shape (B, H * W, D).
            hw (tuple[int, int]): Rows H and columns W.
            window (int): Side of the windows to attend in, in tokens; 0 attends over
                the whole map. Defaults to 0.

        Returns:
            Tensor: Tokens (B, H * W, D).
        """
        if not window:
            return self.proj(self._attend(x, hw))
        plan = window_plan(*hw, window, 0, x.device)
        attended = self._attend(to_windows(x, plan), (window, window))
        return self.proj(from_windows(attended, plan, x.shape[0]))

    def _attend(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        positions = ()
        if self.use_rel_pos:
            tables = zip((self.rel_pos_h, self.rel_pos_w), hw, strict=True)
            positions = [relative_positions(*pair).to(qkv.dtype) for pair in tables]
            if usable(x):
                return GridAttention.apply(qkv, *positions, self.scale)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        scale = self.scale
        if positions:
            query, key = self._add_positions(query, key, *positions)
            scale = 1.0
        x = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return x.transpose(1, 2).flatten(2)

    def _add_positions(
        self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Append the bias of each key row and column, and which one each key is in."""
        height, width = rows.shape[0], columns.shape[0]
        grid = query.unflatten(2, (height, width))
        bias_h = torch.einsum('bnhwc,hkc->bnhwk', grid, rows).flatten(2, 3)
        bias_w = torch.einsum('bnhwc,wkc->bnhwk', grid, columns).flatten(2, 3)
        eye_h = torch.eye(height, dtype=key.dtype, device=key.device)
        eye_w = torch.eye(width, dtype=key.dtype, device=key.device)
        in_row = eye_h[:, None].expand(-1, width, -1).flatten(0, 1)
        in_column = eye_w.expand(height, -1, -1).flatten(0, 1)
        in_row, in_column = (
            eye.expand(*key.shape[:3], -1) for eye in (in_row, in_column)
        )
        query = torch.cat((query * self.scale, bias_h, bias_w), dim=-1)
        return query, torch.cat((key, in_row, in_column), dim=-1)


class Block(BaseModule):
    """Transformer block with attention in windows or over the whole map.

    Args:
        embed_dims (int): Channels D.
        num_heads (int): Heads.
        feedforward_channels (int): Hidden channels of the feed-forward network.
        window_size (int): Side of a window in tokens; 0 attends over the whole map.
        drop_rate (float): Dropout of the feed-forward network. Defaults to 0.0.
        drop_path_rate (float): Stochastic depth of both branches. Defaults to 0.0.
        qkv_bias (bool): Bias on query, key and value. Defaults to True.
        act_cfg (dict): Activation. Defaults to ``dict(type='GELU')``.
        norm_cfg (dict): Norm layer. Defaults to ``dict(type='LN', eps=1e-6)``.
        rel_pos_hw (tuple[int, int], optional): See :class:`Attention`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        feedforward_channels: int,
        window_size: int,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        qkv_bias: bool = True,
        act_cfg: dict = dict(type='GELU'),
        norm_cfg: dict = dict(type='LN', eps=1e-6),
        rel_pos_hw: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.ln1 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.attn = Attention(embed_dims, num_heads, qkv_bias, rel_pos_hw)
        self.drop_path = ScaledDropPath(drop_path_rate)
        self.ln2 = build_norm_layer(norm_cfg, embed_dims)[1]
        ffn = FFN(
            embed_dims=embed_dims,
            feedforward_channels=feedforward_channels,
            ffn_drop=drop_rate,
            act_cfg=act_cfg,
        )
        ffn.dropout_layer = ScaledDropPath(drop_path_rate)
        self.ffn = ChunkedFFN(ffn)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Transform tokens.

        Args:
            x (Tensor): Tokens. Has shape (B, H * W, D).
            hw (tuple[int, int]): Rows H and columns W.

        Returns:
            Tensor: Tokens (B, H * W, D).
        """
        x = x + self.drop_path(self.attn(self.ln1(x), hw, self.window_size))
        return self.ffn(self.ln2(x), identity=x)


@register('MODELS')
class CondTokViT(BaseModule):
    """Plain vision transformer for detection whose embedded tokens are conditioned.

    After ViTDet (Li et al., arXiv 2203.16527): attention in windows, but for a few
    blocks over the whole map. Any image size; parameters are named as in mmpretrain's
    ``VisionTransformer`` and ``ViTSAM``, whose checkpoints load.

    Args:
        arch (str | dict): 'tiny', 'small', 'base' or 'large', or a dict of
            embed_dims, num_layers, num_heads, and optionally feedforward_channels
            (four times embed_dims) and global_attn_indexes (the last block of each
            quarter). Defaults to 'base'.
        img_size (int | tuple[int, int]): Image size that the position embedding and
            the relative positions of global blocks are made for, in pixels. Other
            sizes are interpolated. Defaults to 224.
        patch_size (int): Patch size in pixels. Defaults to 16.
        in_channels (int): Image channels. Defaults to 3.
        out_indices (int | Sequence[int]): Blocks whose output is returned, negative
            ones from the end. Defaults to -1.
        drop_rate (float): Dropout rate. Defaults to 0.0.
        drop_path_rate (float): Stochastic depth of the last block; it grows linearly
            from 0 at the first. Defaults to 0.0.
        qkv_bias (bool): Bias on query, key and value. Defaults to True.
        patch_norm (bool): Put ``norm_cfg`` behind the patch embedding, as Swin does;
            with ``conditioner=None`` a control for what a norm alone gives. Defaults to
            False.
        use_abs_pos (bool): Add an absolute position embedding. Defaults to True.
        use_rel_pos (bool): Add decomposed relative positions. Defaults to False.
        window_size (int): Side of an attention window in tokens. Defaults to 14.
        act_cfg (dict): Activation. Defaults to ``dict(type='GELU')``.
        norm_cfg (dict): Norm layer. Defaults to ``dict(type='LN', eps=1e-6)``.
        with_cp (bool): Recompute the blocks in the backward pass, to save memory.
            Defaults to False.
        frozen_stages (int): -1 freezes nothing, 0 the embeddings, k the first k
            blocks too. Defaults to -1.
        conditioner (dict | TokenConditioner, optional): Arguments of
            :class:`condtok_mm.conditioning.TokenConditioner`. Defaults to None, which
            leaves the tokens as they are.
        min_matched (float): Least share of the backbone's keys that a checkpoint must
            have, in [0, 1]. Defaults to 0.9.
        init_cfg (dict, optional): Initialisation. Defaults to None.

    Raises:
        TypeError: If an argument, or one of the conditioner, has a wrong type or name.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        arch: str | dict = 'base',
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        qkv_bias: bool = True,
        patch_norm: bool = False,
        use_abs_pos: bool = True,
        use_rel_pos: bool = False,
        window_size: int = 14,
        act_cfg: dict = dict(type='GELU'),
        norm_cfg: dict = dict(type='LN', eps=1e-6),
        with_cp: bool = False,
        frozen_stages: int = -1,
        conditioner: dict | TokenConditioner | None = None,
        min_matched: float = MIN_MATCHED,
        init_cfg: dict | None = None,
    ) -> None:
        check_init_cfg('init_cfg', init_cfg)
        super().__init__(init_cfg)
        arch = arch_settings(arch)
        check_arguments(
            dict(
                img_size=img_size,
                patch_size=patch_size,
                in_channels=in_channels,
                drop_rate=drop_rate,
                drop_path_rate=drop_path_rate,
                qkv_bias=qkv_bias,
                patch_norm=patch_norm,
                use_abs_pos=use_abs_pos,
                use_rel_pos=use_rel_pos,
                window_size=window_size,
                act_cfg=act_cfg,
                norm_cfg=norm_cfg,
                with_cp=with_cp,
            )
        )
        check_integer('frozen_stages', frozen_stages, -1, arch['num_layers'])
        self.embed_dims = arch['embed_dims']
        self.num_layers = arch['num_layers']
        self.with_cp = with_cp
        self.frozen_stages = frozen_stages
        self.out_indices = _out_indices(out_indices, self.num_layers)

        self.patch_embed = PatchEmbed(
            in_channels=in_channels,
            embed_dims=self.embed_dims,
            kernel_size=patch_size,
            stride=patch_size,
            norm_cfg=norm_cfg if patch_norm else None,
        )
        grid = tuple(side // patch_size for side in to_2tuple(img_size))
        if 0 in grid:
            raise ValueError(
                f'img_size={img_size} is smaller than patch_size={patch_size}.'
            )
        self.pos_embed = None
        if use_abs_pos:
            self.pos_embed = nn.Parameter(torch.zeros(1, *grid, self.embed_dims))
        self.drop_after_pos = nn.Dropout(drop_rate)

        self.layers = ModuleList()
        for index in range(self.num_layers):
            size = 0 if index in arch['global_attn_indexes'] else window_size
            self.layers.append(
                Block(
                    embed_dims=self.embed_dims,
                    num_heads=arch['num_heads'],
                    feedforward_channels=arch['feedforward_channels'],
                    window_size=size,
                    drop_rate=drop_rate,
                    drop_path_rate=drop_path_rate * index / max(self.num_layers - 1, 1),
                    qkv_bias=qkv_bias,
                    act_cfg=act_cfg,
                    norm_cfg=norm_cfg,
                    rel_pos_hw=((size, size) if size else grid)
                    if use_rel_pos
                    else None,
                )
            )
        self._freeze_stages()
        install_conditioner(self, conditioner)
        install_checkpoint_reader(self, min_matched, new=r'\.rel_pos_[hw]$')

    def init_weights(self) -> None:
        """Initialise as ViTDet does, or from ``init_cfg`` where there is one."""
        if self.init_cfg:
            super().init_weights()
            return
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                constant_init(module, 1.0)
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)

    def train(self, mode: bool = True) -> 'CondTokViT':
        """Set training mode, frozen stages excepted.

        Args:
            mode (bool): Training (True) or evaluation. Defaults to True.

        Returns:
            CondTokViT: The module.
        """
        super().train(mode)
        self._freeze_stages()
        return self

    def _freeze_stages(self) -> None:
        if self.frozen_stages < 0:
            return
        if self.pos_embed is not None:
            self.pos_embed.requires_grad_(False)
        frozen = self.layers[: self.frozen_stages]
        for module in (self.patch_embed, self.drop_after_pos, *frozen):
            module.eval()
            module.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Extract features.

        Args:
            images (Tensor): Normalised images. Has shape (B, C, H, W).

        Returns:
            tuple[Tensor, ...]: For each of ``out_indices`` a map (B, D, H / patch_size,
            W / patch_size), sides rounded up.
        """
        x, grid = self.patch_embed(images)
        # The convolution leaves channels first; every block would copy that again.
        x = x.contiguous()
        if self.pos_embed is not None:
            # In fp32 under autocast, and so is all that is added to x from here on.
            x = x + resize_absolute_positions(self.pos_embed, grid).flatten(1, 2)
        x = self.drop_after_pos(x)
        outs = []
        for index, layer in enumerate(self.layers):
            if self.with_cp and x.requires_grad:
                x = checkpoint(layer, x, grid, use_reentrant=False)
            else:
                x = layer(x, grid)
            if index in self.out_indices:
                outs.append(x.mT.unflatten(2, grid).contiguous())
        return tuple(outs)

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Depth of a parameter, for layer-wise learning-rate decay.

        Args:
            param_name (str): Name of the parameter.
            prefix (str): What the names of the backbone's parameters begin with.
                Defaults to ''.

        Returns:
            tuple[int, int]: The depth, 0 for the embeddings, and the number of depths;
            what is outside the backbone has the last one.
        """
        embeddings = ('patch_embed.', 'pos_embed')
        return depth_of(param_name, prefix, embeddings, 'layers.', self.num_layers)


def arch_settings(arch: str | dict) -> dict:
    """Fill in what an architecture leaves out.

    Args:
        arch (str | dict): See :class:`CondTokViT`.

    Returns:
        dict: All of ``ARCH_KEYS``.

    Raises:
        ValueError: If a name or a key is unknown, or a value out of range.
    """
    if not isinstance(arch, dict):
        if not isinstance(arch, str) or arch not in ARCHS:
            raise ValueError(
                f'arch must be one of {", ".join(ARCHS)} or a dict, but got '
                f'{shown(arch)}.'
            )
        arch = ARCHS[arch]
    unknown = set(arch) - set(ARCH_KEYS)
    missing = set(ARCH_KEYS[:3]) - set(arch)
    if unknown or missing:
        raise ValueError(
            f'arch lacks {sorted(missing)} and has the unknown '
            f'{sorted(map(str, unknown))}; its '
            f'keys are {", ".join(ARCH_KEYS)}, the last two optional.'
        )
    check_arguments(arch, 'arch.')
    check_integer('arch.num_heads', arch['num_heads'], 1)
    depth = arch['num_layers']
    quarter = max(depth // 4, 1)
    arch = dict(
        feedforward_channels=4 * arch['embed_dims'],
        global_attn_indexes=tuple(range(quarter - 1, depth, quarter)),
    ) | dict(arch)
    check_heads(arch['embed_dims'], arch['num_heads'])
    if arch['global_attn_indexes'] not in ((), []):
        indexes = arch['global_attn_indexes']
        check_integers('arch.global_attn_indexes', indexes, 0, depth - 1)
    return arch


def _out_indices(indices: int | Sequence[int], depth: int) -> tuple[int, ...]:
    indices = (indices,) if isinstance(indices, int) else indices
    check_integers('out_indices', indices, -depth, depth - 1)
    wanted = tuple(index % depth for index in indices)
    if len(set(wanted)) < len(wanted):
        raise ValueError(f'out_indices names a block twice: {indices}.')
    return wanted
