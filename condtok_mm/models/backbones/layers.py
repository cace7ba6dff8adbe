"""What our transformers share: layers of mmcv, the same but lighter, and their like."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let batch norms in training use the statistics of a batch, and keep none of it.

    Args:
        module (nn.Module): What holds the norms.
    """
    norms = [
        norm
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.track_running_stats
    ]
    # Switching the tracking off would save other tensors for the backward pass.
    kept = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)


def depth_of(
    param_name: str,
    prefix: str,
    embeddings: tuple[str, ...],
    blocks: str,
    num_blocks: int,
) -> tuple[int, int]:
    """Depth of a parameter in a backbone of one list of blocks.

    Args:
        param_name (str): Name of the parameter.
        prefix (str): What the names of the backbone's parameters begin with.
        embeddings (tuple[str, ...]): Beginnings of names at depth 0.
        blocks (str): Beginning of the names in the blocks, before their index.
        num_blocks (int): Number of blocks, L.

    Returns:
        tuple[int, int]: The depth, and the number of depths L + 2; all other names
        have the last one.
    """
    num_depths = num_blocks + 2
    name = param_name.removeprefix(prefix)
    if param_name.startswith(prefix):
        if name.startswith(embeddings):
            return 0, num_depths
        if name.startswith(blocks):
            return int(name.removeprefix(blocks).split('.')[0]) + 1, num_depths
    return num_depths - 1, num_depths
