"""Bring the weights of a file to the shapes that a backbone has."""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .resizing import resize_absolute_positions, resize_patches, resize_table

EXTRA_TOKENS = (0, 1, 2)
"""Tokens before the patches: none, a class token, a distillation token too."""

EXTRA_BIASES = 3
"""Entries of BEiT's relative position tables for the class token."""

LAYER_SCALES = (
    (r'\.attn\.gamma1\.weight$', '.attn.proj.'),
    (r'\.ffn\.gamma2\.weight$', '.ffn.layers.1.'),
    (r'\.ffn\.gamma2\.weight$', '.ffn.w3.'),
)
"""Layer scales, and the projection in front of each."""


def fit(
    state_dict: dict[str, Tensor], target: dict[str, Tensor], backbone: nn.Module
) -> tuple[dict[str, Tensor], dict[str, tuple], list[str]]:
    """Resize what depends on image, window or patch size, and fold layer scales.

    Absolute positions and relative position tables are resized bicubically, in place
    of what a stock class would do on loading, decomposed relative positions linearly,
    as ViTDet and SAM do in their forward, and patches by a pseudo-inverse. Extra tokens
    in front of the positions are kept or dropped. A layer scale that the backbone lacks
    is multiplied into the projection before it.

    Args:
        state_dict (dict[str, Tensor]): Weights, under the backbone's names.
        target (dict[str, Tensor]): The backbone's own state dict.
        backbone (nn.Module): What they are for.

    Returns:
        tuple[dict[str, Tensor], dict[str, tuple], list[str]]: The weights; for each
        one that was resized its shapes before and after; and notes.
    """
    fitted, notes = _fold_layer_scales(state_dict, target)
    resized = {}
    for key, value in fitted.items():
        if key not in target or value.shape == target[key].shape:
            continue
        new = _resize(key, value, target[key], backbone, state_dict)
        if new is not None and new.shape == target[key].shape:
            resized[key] = tuple(value.shape), tuple(new.shape)
            fitted[key] = new.contiguous()
    return fitted, resized, notes


def _resize(
    key: str, value: Tensor, target: Tensor, backbone: nn.Module, state_dict: dict
) -> Tensor | None:
    name = key.rsplit('.', 1)[-1]
    if name in ('pos_embed', 'absolute_pos_embed'):
        return _resize_positions(value, target, backbone, _extras(state_dict))
    if name == 'relative_position_bias_table':
        return _resize_bias_table(value, target)
    if name in ('rel_pos_h', 'rel_pos_w') and value.shape[1:] == target.shape[1:]:
        return resize_table(value, target.shape[0])
    if (
        'patch_embed' in key
        and value.dim() == 4
        and value.shape[:2] == target.shape[:2]
    ):
        return resize_patches(value, tuple(target.shape[2:]))
    return None


def _resize_positions(
    value: Tensor, target: Tensor, backbone: nn.Module, extras: tuple[int, ...]
) -> Tensor | None:
    """Positions as (1, n, D) or (1, h, w, D), whichever is wanted."""
    extra, grid = 0, tuple(target.shape[1:3])
    if target.dim() == 3:
        extra, grid = _target_grid(target, backbone)
    if grid is None or value.shape[-1] != target.shape[-1]:
        return None
    front, positions = _split_positions(value, grid, extras)
    if positions is None:
        return None
    positions = resize_absolute_positions(positions, grid)
    if target.dim() == 4:
        return positions
    # Where the file has no position for an extra token, it adds none.
    front = F.pad(front[:, :extra], (0, 0, 0, max(extra - front.shape[1], 0)))
    return torch.cat((front, positions.flatten(1, 2)), dim=1)


def _extras(state_dict: dict) -> tuple[int, ...]:
    """Numbers of extra tokens that a file's positions may begin with."""
    tokens = sum(f'{kind}_token' in state_dict for kind in ('cls', 'dist'))
    if 'reg_token' in state_dict:
        # timm's models with registers keep positions of patches alone.
        return (0,)
    if tokens:
        return (tokens,)
    # ViTDet keeps the position of a class token that it does not have.
    vitdet = any(key.endswith('.rel_pos_h') for key in state_dict)
    return (0, 1) if vitdet else (0,)


def _target_grid(target: Tensor, backbone: nn.Module) -> tuple[int, tuple | None]:
    """Extra tokens and grid of a flat position embedding (1, n, D)."""
    embedding = getattr(backbone, 'patch_embed', None)
    grid = tuple(getattr(embedding, 'init_out_size', None) or ())
    if grid and (extra := target.shape[1] - math.prod(grid)) in EXTRA_TOKENS:
        return extra, grid
    return _square(target.shape[1], EXTRA_TOKENS)


def _split_positions(
    value: Tensor, expected: tuple[int, int], extras: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Extra tokens (1, k, D) and grid (1, h, w, D) of a file's positions.

    The grid is square, or the one that is wanted.
    """
    if value.dim() == 4:
        return value.new_zeros(1, 0, value.shape[-1]), value
    extra, grid = _square(value.shape[1], extras)
    if grid is None:
        exact = (k for k in (*extras, 0) if value.shape[1] - k == math.prod(expected))
        extra, grid = next(((k, expected) for k in exact), (0, None))
    if grid is None:
        return value, None
    return value[:, :extra], value[:, extra:].unflatten(1, grid)


def _square(count: int, extras: tuple[int, ...]) -> tuple[int, tuple | None]:
    for extra in extras:
        side = math.isqrt(max(count - extra, 0))
        if side and side * side == count - extra:
            return extra, (side, side)
    return 0, None


def _resize_bias_table(value: Tensor, target: Tensor) -> Tensor | None:
    """Resize biases ((2 w - 1)^2 + extras, heads) to another window."""
    if value.shape[1:] != target.shape[1:]:
        return None
    for extra in (0, EXTRA_BIASES):
        before, after = (_square(len(table), (extra,))[1] for table in (value, target))
        if before and after:
            body, rest = value[: len(value) - extra], value[len(value) - extra :]
            body = body.unflatten(0, before)[None]
            body = resize_absolute_positions(body, after)[0].flatten(0, 1)
            return torch.cat((body, rest))
    return None


def _fold_layer_scales(
    state_dict: dict[str, Tensor], target: dict[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    fitted, folded = dict(state_dict), 0
    for key in state_dict:
        for pattern, projection in LAYER_SCALES:
            if key in target or not re.search(pattern, key):
                continue
            layer = re.sub(pattern, projection, key)
            if layer + 'weight' not in fitted:
                continue
            scale = fitted.pop(key)
            for name in ('weight', 'bias'):
                if (full := layer + name) in fitted:
                    shape = (-1,) + (1,) * (fitted[full].dim() - 1)
                    fitted[full] = fitted[full] * scale.view(shape)
            folded += 1
    if not folded:
        return fitted, []
    return fitted, [f'{folded} layer scales multiplied into the projections before.']
