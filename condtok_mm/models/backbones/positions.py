"""Position embeddings of vision transformers, at any size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EXTRA_TOKENS = (0, 1, 2)
"""Tokens before the patches in a checkpoint: none, a class token, a distilled one."""


def resize_absolute_positions(positions: Tensor, grid_hw: tuple[int, int]) -> Tensor:
    """Interpolate an absolute position embedding to a grid, bicubically.

    Args:
        positions (Tensor): Embedding. Has shape (1, h, w, D).
        grid_hw (tuple[int, int]): Rows and columns that are wanted.

    Returns:
        Tensor: Embedding (1, H, W, D); the same tensor where the size fits.
    """
    if _fits(tuple(positions.shape[1:3]), tuple(grid_hw)):
        return positions
    resized = F.interpolate(
        positions.permute(0, 3, 1, 2).float(),
        size=grid_hw,
        mode='bicubic',
        align_corners=False,
    )
    return resized.permute(0, 2, 3, 1).to(positions.dtype)


def relative_positions(table: Tensor, size: int) -> Tensor:
    """Position vectors of every query and key along one axis.

    Args:
        table (Tensor): One vector for each distance. Has shape (2 L - 1, D). It is
            interpolated linearly where L is not ``size``.
        size (int): Tokens along the axis.

    Returns:
        Tensor: Vectors (size, size, D), by query and by key.
    """
    table = _resize_table(table, 2 * size - 1)
    steps = torch.arange(size, device=table.device)
    return table[steps[:, None] - steps[None, :] + size - 1]


def fit_absolute_positions(state_dict: dict, key: str, target: Tensor) -> None:
    """Bring a checkpoint's absolute position embedding to the shape of the model's.

    Args:
        state_dict (dict): Checkpoint. It is changed in place.
        key (str): Key of the embedding in it, (1, h, w, D) or (1, n, D) with or
            without extra tokens in front. Nothing happens where it is missing.
        target (Tensor): The model's embedding. Has shape (1, H, W, D).

    Raises:
        ValueError: If the embedding has other channels or is not of a grid.
    """
    positions = state_dict.get(key)
    if positions is None or positions.shape == target.shape:
        return
    if positions.shape[-1] != target.shape[-1]:
        raise ValueError(
            f'{key} has {positions.shape[-1]} channels in the checkpoint and '
            f'{target.shape[-1]} in the model: it belongs to another architecture.'
        )
    if positions.dim() == 3:
        positions = _to_grid(positions, key, tuple(target.shape[1:3]))
    state_dict[key] = resize_absolute_positions(positions, tuple(target.shape[1:3]))


def fit_relative_positions(state_dict: dict, key: str, target: Tensor) -> None:
    """Bring a checkpoint's relative position table to the length of the model's.

    Args:
        state_dict (dict): Checkpoint. It is changed in place.
        key (str): Key of the table in it. Nothing happens where it is missing.
        target (Tensor): The model's table. Has shape (2 L - 1, D).
    """
    if key in state_dict:
        state_dict[key] = _resize_table(state_dict[key], target.shape[0])


def _resize_table(table: Tensor, length: int) -> Tensor:
    if _fits(table.shape[0], length):
        return table
    resized = F.interpolate(table.T[None].float(), size=length, mode='linear')
    return resized[0].T.to(table.dtype)


def _fits(size, wanted) -> bool:
    # A size that is compared becomes a constant of an exported graph. torch before 2.7
    # tells only that it compiles.
    compiler = torch.compiler
    exporting = getattr(compiler, 'is_exporting', compiler.is_compiling)()
    return not exporting and size == wanted


def _to_grid(positions: Tensor, key: str, expected_hw: tuple[int, int]) -> Tensor:
    """Reshape (1, n, D) to (1, h, w, D), without the extra tokens in front."""
    count = positions.shape[1]
    for extra in EXTRA_TOKENS:
        if count - extra == math.prod(expected_hw):
            return positions[:, extra:].unflatten(1, expected_hw)
    for extra in EXTRA_TOKENS:
        side = math.isqrt(count - extra)
        if side * side == count - extra:
            return positions[:, extra:].unflatten(1, (side, side))
    raise ValueError(
        f'{key} has {count} positions in the checkpoint, which is neither a square '
        f'grid nor one of {expected_hw[0]} x {expected_hw[1]}, with up to '
        f'{EXTRA_TOKENS[-1]} extra tokens in front.'
    )
