"""Which tokens hold image and which hold batch padding."""

from collections.abc import Sequence

import torch
from torch import Tensor

PAD_ATOL = 1e-4
"""Pixels within this of the pad value are padding. One grey level is 0.004 or more."""


def valid_tokens(
    images: Tensor,
    grid_hw: tuple[int, int],
    pad_value: float | Sequence[float],
    stride: tuple[int, int] | None = None,
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
        stride (tuple[int, int], optional): Pixels from one token to the next. Defaults
            to None, which infers them from the sizes; small images can leave more
            than one answer.

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
    values = [pad_value] if isinstance(pad_value, (int, float)) else list(pad_value)
    if len(values) not in (1, channels):
        raise ValueError(
            f'pad_value must be one number or one for each of the {channels} channels, '
            f'but got {pad_value}.'
        )
    # Filled in and not copied from the host, which a GPU would have to wait for.
    pad = torch.cat([images.new_full((1, 1, 1), value) for value in values]).float()
    # Written so that nan is content.
    content = ~((images.float() - pad).abs_().amax(1) <= PAD_ATOL)
    used_height = _last_true(content.any(2))
    used_width = _last_true(content.any(1))
    steps = stride or _infer_stride((height, width), grid_hw)
    valid_rows, valid_columns = (
        torch.arange(tokens, device=images.device) * step < used.unsqueeze(1)
        for tokens, step, used in zip(
            grid_hw, steps, (used_height, used_width), strict=True
        )
    )
    return (valid_rows.unsqueeze(2) & valid_columns.unsqueeze(1)).flatten(1)


def _last_true(flags: Tensor) -> Tensor:
    """Index of the last True plus one, per row of (B, L); 0 where there is none."""
    positions = torch.arange(1, flags.shape[1] + 1, device=flags.device)
    return torch.where(flags, positions, 0).amax(1)


def _infer_stride(size: tuple[int, int], grid: tuple[int, int]) -> tuple[float, float]:
    """Guess the patch strides from the pixels and the tokens that cover them.

    Embeddings round the grid up or down, so that more than one square stride can
    fit; then the one with the most factors of two is taken. Where none fits, the
    patches are not square.
    """
    lowest = max(1, size[0] // (grid[0] + 1))
    highest = -(-size[0] // max(1, grid[0] - 1))
    fits = [
        step
        for step in range(lowest, highest + 1)
        if all(pixels // step == n for pixels, n in zip(size, grid, strict=True))
        or all(-(-pixels // step) == n for pixels, n in zip(size, grid, strict=True))
    ]
    if fits:
        step = max(fits, key=lambda step: (step & -step, step))
        return step, step
    return size[0] / grid[0], size[1] / grid[1]
