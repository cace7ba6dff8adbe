"""Layers of mmcv, the same but lighter, that our transformers share."""

import torch
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn

from .cpu_kernels import FeedForward, usable


class InPlaceOf(nn.Module):
    """Mixed into a subclass of a stock layer, takes over a layer that is built.

    Args:
        stock (nn.Module): What to take the place of, with its parameters.
    """

    def __init__(self, stock: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(stock.__dict__)


class ChunkedFFN(InPlaceOf, FFN):
    """mmcv's ``FFN``, with its hidden layer kept in the cache on CPU.

    Args:
        stock (FFN): What to take the place of, with its parameters.
    """

    def forward(self, x: Tensor, identity: Tensor | None = None) -> Tensor:
        """Transform each token.

        Args:
            x (Tensor): Tokens. Has shape (..., D).
            identity (Tensor, optional): What the result is added to. Defaults to None,
                which is ``x``.

        Returns:
            Tensor: Tokens (..., D).
        """
        (first, act, drop), second, last_drop = self.layers
        if not usable(x, first, act, drop, second, last_drop):
            return super().forward(x, identity)
        out = FeedForward.apply(
            x.flatten(0, -2),
            first.weight,
            first.bias,
            second.weight,
            second.bias,
            act.approximate,
            torch.is_grad_enabled(),
        ).view_as(x)
        out = self.dropout_layer(self.gamma2(out))
        return (x if identity is None else identity) + out


class ScaledDropPath(DropPath):
    """mmcv's ``DropPath`` in one product, which keeps nothing for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop the path of some images and scale that of the others.

        Args:
            x (Tensor): What the path returned. Has shape (B, ...).

        Returns:
            Tensor: The same shape.
        """
        if self.drop_prob == 0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * ((keep + x.new_empty(shape).uniform_()).floor() / keep)
