"""mmdet's Swin Transformer with conditioned tokens and fused attention."""

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinTransformer
from mmdet.models.layers import PatchMerging
from torch import Tensor, nn

from ...arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_integers,
    check_number,
    check_type,
)
from ...checkpoints import MIN_MATCHED, install_checkpoint_reader
from ...conditioning import TokenConditioner
from ...registry import register
from ..arguments import check_heads, stock_arguments
from .cpu_kernels import WindowAttention, usable, watched
from .install import install_conditioner
from .layers import ChunkedFFN, InPlaceOf, ScaledDropPath
from .windows import from_windows, to_windows, window_biases, window_plan

ATTENTIONS = ('fused', 'stock')


class FusedShiftWindowMSA(InPlaceOf, ShiftWindowMSA):
    """mmdet's ``ShiftWindowMSA`` with fewer copies and fused attention.

    Args:
        stock (ShiftWindowMSA): What to take the place of, with its parameters.
    """

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend within windows.

        Args:
            query (Tensor): Tokens. Has shape (B, H * W, D).
            hw_shape (tuple[int, int]): Rows H and columns W.

        Returns:
            Tensor: Tokens (B, H * W, D).
        """
        batch = query.shape[0]
        plan = window_plan(*hw_shape, self.window_size, self.shift_size, query.device)
        biases, kinds = window_biases(self._bias(), plan, batch)
        x = self._attend(to_windows(query, plan), biases, kinds)
        return self.drop(from_windows(x, plan, batch))

    def _bias(self) -> Tensor:
        """Relative position bias (heads, L, L)."""
        msa = self.w_msa
        bias = msa.relative_position_bias_table[msa.relative_position_index.flatten()]
        return bias.T.unflatten(1, msa.relative_position_index.shape).contiguous()

    def _attend(self, x: Tensor, biases: Tensor, kinds: Tensor | None) -> Tensor:
        msa = self.w_msa
        if usable(x, msa.qkv, msa.attn_drop, msa.proj, msa.proj_drop):
            return WindowAttention.apply(
                x,
                msa.qkv.weight,
                msa.qkv.bias,
                biases,
                kinds,
                msa.proj.weight,
                msa.proj.bias,
                msa.scale,
                torch.is_grad_enabled(),
            )
        qkv = msa.qkv(x).unflatten(-1, (3, msa.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(
            query,
            key,
            value,
            (biases[None] if kinds is None else biases[kinds]).to(query.dtype),
            msa.attn_drop.p if self.training else 0.0,
            scale=msa.scale,
        )
        return msa.proj_drop(msa.proj(x.transpose(1, 2).flatten(2)))


class FusedPatchMerging(InPlaceOf, PatchMerging):
    """mmdet's ``PatchMerging`` with one copy in place of three.

    Pixels of a patch are laid side by side as they lie in memory, and the parameters,
    which expect them channel by channel, are reordered instead.

    Args:
        stock (PatchMerging): What to take the place of, with its parameters.
    """

    def forward(
        self, x: Tensor, input_size: tuple[int, int]
    ) -> tuple[Tensor, tuple[int, int]]:
        """Merge patches of two by two tokens.

        Args:
            x (Tensor): Tokens. Has shape (B, H * W, D).
            input_size (tuple[int, int]): Rows H and columns W.

        Returns:
            tuple[Tensor, tuple[int, int]]: Merged tokens, and their rows and columns,
            rounded up.
        """
        norm, reduction = self.norm, self.reduction
        if (
            type(norm) is not nn.LayerNorm
            or type(reduction) is not nn.Linear
            or watched(norm)
            or watched(reduction)
        ):
            return super().forward(x, input_size)
        height, width = input_size
        batch, _, channels = x.shape
        x = x.view(batch, height, width, channels)
        x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        rows, columns = (height + 1) // 2, (width + 1) // 2
        x = x.view(batch, rows, 2, columns, 2, channels).transpose(2, 3)
        x = x.reshape(batch, rows * columns, 4 * channels)
        weight, bias = (
            parameter.view(channels, 4).T.flatten()
            for parameter in (norm.weight, norm.bias)
        )
        x = F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
        weight = reduction.weight.view(-1, channels, 4).transpose(1, 2).flatten(1)
        return F.linear(x, weight, reduction.bias), (rows, columns)


@register('MODELS')
class CondTokSwinTransformer(SwinTransformer):
    """Swin Transformer (arXiv 2103.14030) whose embedded tokens are conditioned.

    mmdet's class with a conditioner behind its patch embedding. Parameters and
    state-dict keys are the same; with ``conditioner=None, attn='stock'`` so is every
    bit.

    Args:
        *args: Arguments of ``mmdet.models.SwinTransformer``.
        attn (str): 'fused' computes the same faster and in less memory, with the same
            parameters; 'stock' is mmdet's attention. Defaults to 'fused'.
        conditioner (dict | TokenConditioner, optional): Arguments of
            :class:`condtok_mm.conditioning.TokenConditioner`. Defaults to None, which
            leaves the tokens as they are.
        min_matched (float): Least share of the backbone's keys that a checkpoint must
            have, in [0, 1]. Defaults to 0.9.
        **kwargs: Keyword arguments of ``mmdet.models.SwinTransformer``.

    Raises:
        TypeError: If an argument, or one of the conditioner, has a wrong type or name.
        ValueError: If one is out of range.
    """

    def __init__(
        self,
        *args,
        attn: str = 'fused',
        conditioner: dict | TokenConditioner | None = None,
        min_matched: float = MIN_MATCHED,
        **kwargs,
    ) -> None:
        check_choice('attn', attn, ATTENTIONS)
        _check(stock_arguments(SwinTransformer, args, kwargs))
        super().__init__(*args, **kwargs)
        if attn == 'fused':
            self._fuse()
        install_conditioner(self, conditioner)
        install_checkpoint_reader(self, min_matched, new=r'^norm\d\.')

    def _fuse(self) -> None:
        for stage in self.stages:
            merging = stage.downsample
            if merging is not None and merging.sampler.kernel_size == (2, 2) == (
                merging.sampler.stride
            ):
                stage.downsample = FusedPatchMerging(merging)
            for block in stage.blocks:
                block.attn = FusedShiftWindowMSA(block.attn)
                block.ffn = ChunkedFFN(block.ffn)
                for owner, name in ((block.attn, 'drop'), (block.ffn, 'dropout_layer')):
                    drop = getattr(owner, name)
                    if type(drop) is DropPath:
                        setattr(owner, name, ScaledDropPath(drop.drop_prob))

    def train(self, mode: bool = True) -> 'CondTokSwinTransformer':
        """Set training mode, frozen stages excepted.

        Args:
            mode (bool): Training (True) or evaluation. Defaults to True.

        Returns:
            CondTokSwinTransformer: The module, which mmdet's class does not return.
        """
        super().train(mode)
        return self


def _check(arguments: dict) -> None:
    """Raise unless arguments of the stock class go together."""
    depths, heads, strides = (
        arguments[name] for name in ('depths', 'num_heads', 'strides')
    )
    check_integers('depths', depths, 1)
    stages = len(depths)
    for name, values in (('num_heads', heads), ('strides', strides)):
        check_integers(name, values, 1)
        if len(values) < stages:
            raise ValueError(
                f'{name} must hold an integer for each of {stages} stages, but got '
                f'{values}.'
            )
    check_integers('out_indices', arguments['out_indices'], 0, stages - 1)
    check_integer('frozen_stages', arguments['frozen_stages'], -1, stages)
    check_flag('convert_weights', arguments['convert_weights'])
    if arguments['pretrained'] is not None:
        check_type('pretrained', arguments['pretrained'], str, 'a file or None')
    if arguments['qk_scale'] is not None:
        check_number('qk_scale', arguments['qk_scale'], '(0, inf)')
    if strides[0] != arguments['patch_size']:
        raise ValueError(
            f'strides[0] must be patch_size={arguments["patch_size"]}, but got '
            f'{strides[0]}.'
        )
    for stage in range(stages):
        check_heads(arguments['embed_dims'] * 2**stage, heads[stage])
