"""Relative positions of vision transformers, at any size."""

import torch
from torch import Tensor

from ...checkpoints.resizing import resize_table


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
