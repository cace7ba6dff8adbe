"""Which tokens hold image and which hold batch padding."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PAD_ATOL = 1e-4
"""Pixels within this of the pad value are padding. One grey level is 0.004 or more."""


def valid_tokens(
    images: Tensor, grid_hw: tuple[int, int], pad_value: float | Sequence[float]
) -> Tensor:
    """Find the tokens that hold image.

    Padding is a token whose whole patch lies in bottom rows or right columns that
    hold ``pad_value`` throughout. Pixels of that value inside the image are image.
    There is no host synchronisation.

    Args:
        images (Tensor): Normalised and padded images. Has shape (B, C, H, W).
        grid_hw (tuple[int, int]): Rows and columns of the token grid, N in all.
        pad_value (float | Sequence[float]): Pixel value of the padding after
            normalisation, one for all channels or one per channel.

    Returns:
        Tensor: Boolean, True where a token holds image. Has shape (B, N).

    Raises:
        ValueError: If the images are not (B, C, H, W), the grid does not fit them, or
            ``pad_value`` has neither one value nor C.
    """
    if images.dim() != 4:
        raise ValueError(
            f'images must have shape (B, C, H, W), but got {tuple(images.shape)}.'
        )
    channels, height, width = images.shape[1:]
    rows, columns = grid_hw
    if not (0 < rows <= height and 0 < columns <= width):
        raise ValueError(
            f'a grid of {rows} x {columns} tokens does not fit images of '
            f'{height} x {width} pixels.'
        )
    pad = torch.as_tensor(pad_value, dtype=torch.float32).flatten()
    if len(pad) not in (1, channels):
        raise ValueError(
            f'pad_value must be one number or one for each of the {channels} channels, '
            f'but got {pad_value}.'
        )
    if len(pad) == 1:
        difference = images - pad.item()
    else:
        difference = images - pad.to(images.device).view(-1, 1, 1)
    content = ~(difference.abs() <= PAD_ATOL).all(1)
    used_height = _last_true(content.any(2))
    used_width = _last_true(content.any(1))
    valid_rows = _starts(height, rows, images.device) < used_height.unsqueeze(1)
    valid_columns = _starts(width, columns, images.device) < used_width.unsqueeze(1)
    return (valid_rows.unsqueeze(2) & valid_columns.unsqueeze(1)).flatten(1)


def _last_true(flags: Tensor) -> Tensor:
    """Index of the last True plus one, per row of (B, L); 0 where there is none."""
    positions = torch.arange(1, flags.shape[1] + 1, device=flags.device)
    return torch.where(flags, positions, 0).amax(1)


def _starts(pixels: int, tokens: int, device: torch.device) -> Tensor:
    """First pixel of each token along one axis."""
    return torch.arange(tokens, device=device) * _stride(pixels, tokens)


def _stride(pixels: int, tokens: int) -> float:
    """Patch stride that covers ``pixels`` with ``tokens``, whole where one exists."""
    for stride in (pixels // tokens, math.ceil(pixels / tokens)):
        if tokens in (pixels // stride, math.ceil(pixels / stride)):
            return stride
    return pixels / tokens
