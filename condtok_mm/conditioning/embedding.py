"""What an embedding layer returns: the tokens in it, and how they lie on the image.

Types are told apart by tuples and not by unions, which break a graph of torch 2.4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Embedding:
    """The output of an embedding layer, taken apart.

    Attributes:
        output: What the layer returned.
        embedded (Tensor): The tensor of tokens in it.
        axis (int): Its axis of channels: 1 in a map, else -1.
        grid (tuple[int, int] | None): Rows and columns of the tokens, if known.
        stride (tuple[int, int] | None): Pixels from one token to the next, if known.
    """

    output: object
    embedded: Tensor
    axis: int
    grid: tuple[int, int] | None
    stride: tuple[int, int] | None

    @property
    def tokens(self) -> Tensor:
        """Tokens (B, N, D)."""
        tokens = self.embedded.movedim(self.axis, -1).flatten(1, -2)
        is_single = tokens.requires_grad and tokens.shape[0] == 1
        if is_single and not tokens.is_contiguous():
            return _ChannelsFirst.apply(tokens)
        return tokens

    def replaced(self, tokens: Tensor):
        """The output with other tokens in it.

        Args:
            tokens (Tensor): Tokens. Has shape (B, N, D).

        Returns:
            What the layer would have returned.
        """
        shape = self.embedded.movedim(self.axis, -1).shape
        tokens = tokens.reshape(shape).movedim(-1, self.axis).contiguous()
        if torch.is_tensor(self.output):
            return tokens
        return type(self.output)(
            tokens if part is self.embedded else part for part in self.output
        )


class _ChannelsFirst(torch.autograd.Function):
    """Identity whose gradient lies in memory as that of a map: channels first.

    For a batch of one, torch (2.10 on CPU) computes the backward pass of batch norm
    wrongly where the gradient has its channels last and the input has not.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor) -> Tensor:
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.mT.contiguous().mT


def read_embedding(layer: nn.Module, images: Tensor, output) -> Embedding:
    """Take the output of an embedding layer apart.

    Args:
        layer (nn.Module): The layer.
        images (Tensor): What it was given.
        output: What it returned: tokens (B, N, D) or a map, alone or in a tuple; see
            :func:`condtok_mm.conditioning.attach_conditioner`.

    Returns:
        Embedding: Its parts.

    Raises:
        ValueError: If there are no tokens in it.
    """
    parts = output if isinstance(output, (tuple, list)) else (output,)
    embedded = next((p for p in parts if torch.is_tensor(p) and p.dim() > 2), None)
    if embedded is None:
        kinds = ', '.join(
            str(tuple(part.shape)) if torch.is_tensor(part) else type(part).__name__
            for part in parts
        )
        raise ValueError(
            'an embedding must return tokens (B, N, D) or a map (B, D, rows, columns), '
            f'but this one returns {kinds}; name another layer as embed.'
        )
    steps = total_stride(layer)
    size = images.shape[2:] if images.dim() == 4 else None
    axis, grid = -1, None
    if embedded.dim() == 4:
        shape = embedded.shape
        last = not _fits(size, steps, shape[2:]) and _fits(size, steps, shape[1:3])
        axis = -1 if last else 1
        grid = tuple(shape[1:3] if last else shape[2:])
    elif embedded.dim() == 3:
        # Windows (B, n, h, w, D) lie in another order than row by row.
        grid = _told_grid(parts) or _strided_grid(size, steps, embedded.shape[1])
    stride = steps if grid is not None and _fits(size, steps, grid) else None
    return Embedding(output, embedded, axis, grid, stride)


def total_stride(layer: nn.Module) -> tuple[int, int]:
    """Product of the strides in a layer.

    Args:
        layer (nn.Module): The layer.

    Returns:
        tuple[int, int]: Pixels along rows and columns.
    """
    rows, columns = 1, 1
    for module in layer.modules():
        if isinstance(module, (nn.Conv2d, nn.Unfold)):
            stride = module.stride
            row, column = stride if isinstance(stride, tuple) else (stride, stride)
            rows, columns = rows * row, columns * column
    return rows, columns


def _told_grid(parts: tuple | list) -> tuple[int, int] | None:
    """A pair, or two numbers, next to the tokens."""
    pairs = [part for part in parts if isinstance(part, (tuple, list))]
    pairs.append([part for part in parts if isinstance(part, int)])
    return next((tuple(pair) for pair in pairs if len(pair) == 2), None)


def _strided_grid(
    size: tuple[int, int] | None, steps: tuple[int, int], count: int
) -> tuple[int, int] | None:
    """The grid of that many tokens that the strides give, rounded down or up."""
    if size is None:
        return None
    grids = zip(
        *(_rounded(*pair) for pair in zip(size, steps, strict=True)), strict=True
    )
    return next((grid for grid in grids if grid[0] * grid[1] == count), None)


def _fits(
    size: tuple[int, int] | None, steps: tuple[int, int], grid: tuple[int, int]
) -> bool:
    """Whether the strides give this grid, each side rounded down or up."""
    return size is not None and all(
        tokens in _rounded(pixels, step)
        for pixels, step, tokens in zip(size, steps, grid, strict=True)
    )


def _rounded(pixels: int, step: int) -> tuple[int, int]:
    return pixels // step, -(-pixels // step)
