"""Position embeddings of vision transformers, at any size."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
    table = resize_table(table, 2 * size - 1)
    steps = torch.arange(size, device=table.device)
    return table[steps[:, None] - steps[None, :] + size - 1]


def resize_table(table: Tensor, length: int) -> Tensor:
    """Interpolate a relative position table to a length, linearly.

    Args:
        table (Tensor): One vector for each distance. Has shape (L, D).
        length (int): What is wanted.

    Returns:
        Tensor: Table (length, D); the same tensor where the length fits.
    """
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
