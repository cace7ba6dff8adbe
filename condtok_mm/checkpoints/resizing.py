"""Interpolate what is learnt for one size to another."""

import math

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


def resize_patches(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize filters so that they see in a resized image what they saw in the image.

    By the pseudo-inverse of a bicubic resize (Beyer et al., arXiv 2212.08013).

    Args:
        weight (Tensor): Filters. Has shape (D, C, h, w).
        size (tuple[int, int]): Rows and columns that are wanted.

    Returns:
        Tensor: Filters (D, C, H, W).
    """
    before = tuple(weight.shape[2:])
    basis = torch.eye(math.prod(before), dtype=torch.float64).unflatten(1, before)
    mode = dict(mode='bicubic', align_corners=False)
    resize = F.interpolate(basis[:, None], size=size, **mode).flatten(1)
    flat = weight.double().flatten(2) @ torch.linalg.pinv(resize).mT
    return flat.unflatten(2, size).to(weight.dtype)


def _fits(size, wanted) -> bool:
    # A size that is compared becomes a constant of an exported graph. torch before 2.7
    # tells only that it compiles.
    compiler = torch.compiler
    exporting = getattr(compiler, 'is_exporting', compiler.is_compiling)()
    return not exporting and size == wanted
