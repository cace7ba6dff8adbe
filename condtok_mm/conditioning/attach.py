"""Put a conditioner behind the embedding layer of a backbone, and take it off again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from threading import Lock

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..arguments import check_type
from .conditioner import TokenConditioner, cast_if_finite
from .embedding import Embedding, read_embedding
from .padding import valid_tokens


def attach_conditioner(
    backbone: nn.Module, conditioner: TokenConditioner, embed: str = 'patch_embed'
) -> nn.Module:
    """Condition what an embedding layer of a backbone returns.

    The layer runs in IEEE fp32 or better, whatever autocast and the TF32 flags say
    (under ``torch.compile`` the TF32 flags hold, as they cannot be switched there),
    and so does the conditioner; the tokens are then cast to the dtype that the layer
    alone would have returned. Batch padding is found in the images and left out. The
    backbone keeps its class, its parameters and its state-dict keys; the conditioner
    becomes its child ``conditioner``.

    Args:
        backbone (nn.Module): Any backbone. It is changed in place.
        conditioner (TokenConditioner): What to attach.
        embed (str): Dotted name of the layer inside the backbone. The layer takes
            images (B, C, H, W) and returns tokens (B, N, D), row by row, or a map
            (B, D, rows, columns), or (B, rows, columns, D) where the strides of its
            convolutions say so, alone or in a tuple. The grid of tokens is a pair in
            that tuple, or two numbers, or follows from the strides. Tokens without any
            of these, and windows (B, n, h, w, D), need ``pad_value=None``. Defaults to
            'patch_embed'.

    Returns:
        nn.Module: The backbone.

    Raises:
        TypeError: If ``conditioner`` is not a TokenConditioner.
        ValueError: If the backbone has no such layer, or a conditioner already.
    """
    check_type('backbone', backbone, nn.Module, 'a module')
    check_type('conditioner', conditioner, TokenConditioner, 'a TokenConditioner')
    check_type('embed', embed, str, 'the dotted name of a layer')
    name = type(backbone).__name__
    if hasattr(backbone, 'conditioner'):
        raise ValueError(
            f'{name} has a conditioner already; call detach_conditioner first.'
        )
    layers = dict(backbone.named_modules())
    if not embed or embed not in layers:
        children = ', '.join(child for child, _ in backbone.named_children())
        raise ValueError(f'{name} has no layer {embed!r}; its children: {children}.')
    layer = layers[embed]
    if 'forward' in vars(layer):
        raise ValueError(
            f'the forward of {embed!r} in {name} has been replaced on the instance; '
            'attach the conditioner before whatever replaces it.'
        )
    layer.forward = ConditionedForward(layer, conditioner)
    backbone.conditioner = conditioner
    return backbone


def detach_conditioner(backbone: nn.Module) -> nn.Module:
    """Undo :func:`attach_conditioner`.

    Args:
        backbone (nn.Module): A backbone with a conditioner. It is changed in place.

    Returns:
        nn.Module: The backbone, as it was.

    Raises:
        ValueError: If no conditioner is attached.
    """
    layer = conditioned_layer(backbone)
    del layer.forward
    del backbone.conditioner
    return backbone


def conditioned_layer(backbone: nn.Module) -> nn.Module:
    """Find the layer that a conditioner sits behind.

    Args:
        backbone (nn.Module): A backbone with a conditioner.

    Returns:
        nn.Module: The embedding layer.

    Raises:
        ValueError: If no conditioner is attached.
    """
    check_type('backbone', backbone, nn.Module, 'a module')
    for layer in backbone.modules():
        if isinstance(vars(layer).get('forward'), ConditionedForward):
            return layer
    raise ValueError(f'{type(backbone).__name__} has no conditioner attached.')


class ConditionedForward:
    """Stands in for the forward of an embedding layer: embed, then condition.

    An object and not a closure, so that the layer can be copied and pickled.

    Args:
        layer (nn.Module): The embedding layer.
        conditioner (TokenConditioner): What its output passes through.
    """

    def __init__(self, layer: nn.Module, conditioner: TokenConditioner) -> None:
        self.layer = layer
        self.conditioner = conditioner
        self._output_dtypes: dict[tuple, torch.dtype] = {}

    def __call__(self, images: Tensor, *args, **kwargs):
        """Embed images (B, C, H, W) and condition the tokens; see the class."""
        if self.conditioner.strength == 0:
            return _stock_forward(self.layer, images, *args, **kwargs)
        dtype = self._stock_dtype(images, *args, **kwargs)
        output = self.embed(images, *args, **kwargs)
        embedding = read_embedding(self.layer, images, output)
        valid = self._valid(images, embedding)
        tokens = self.conditioner(embedding.tokens, valid)
        if dtype is not None:
            tokens = cast_if_finite(tokens, dtype, embedding.tokens)
        return embedding.replaced(tokens)

    def embed(self, images: Tensor, *args, **kwargs):
        """Run the layer alone, in IEEE fp32 or better.

        Args:
            images (Tensor): Images. Has shape (B, C, H, W).
            *args: Further arguments of the layer.
            **kwargs: Further keyword arguments of the layer.

        Returns:
            What the layer returns.
        """
        halves = {
            f'layer.{name}': value.float()
            for name, value in chain(
                self.layer.named_parameters(), self.layer.named_buffers()
            )
            if value.dtype in (torch.float16, torch.bfloat16)
        }
        images = images.to(torch.promote_types(images.dtype, torch.float32))
        switchable = images.is_cuda and not torch.compiler.is_compiling()
        tf32_off = ieee_fp32() if switchable else nullcontext()
        with torch.autocast(images.device.type, enabled=False), tf32_off:
            if halves:
                stock = _Stock(self.layer)
                return functional_call(stock, halves, (images, *args), kwargs)
            return _stock_forward(self.layer, images, *args, **kwargs)

    def tokens(self, images: Tensor, output) -> tuple[Tensor, Tensor | None]:
        """Find the tokens in what the layer returned, and which of them hold image.

        Args:
            images (Tensor): Images. Has shape (B, C, H, W).
            output: What :meth:`embed` returned for them.

        Returns:
            tuple[Tensor, Tensor | None]: Tokens (B, N, D), and the valid ones, boolean
            (B, N), or None where every token counts.

        Raises:
            ValueError: If padding is to be told from image and the grid is unknown.
        """
        embedding = read_embedding(self.layer, images, output)
        return embedding.tokens, self._valid(images, embedding)

    def _valid(self, images: Tensor, embedding: Embedding) -> Tensor | None:
        pad_value = self.conditioner.pad_value
        if pad_value is None:
            return None
        grid, count = embedding.grid, embedding.tokens.shape[1]
        if grid is None or grid[0] * grid[1] != count:
            told = 'no grid' if grid is None else f'a grid of {grid[0]} x {grid[1]}'
            raise ValueError(
                f'{type(self.layer).__name__} returns {count} tokens and {told}, so '
                'padding cannot be told from image; set pad_value=None in the '
                'conditioner to count every token.'
            )
        return valid_tokens(images, grid, pad_value, embedding.stride)

    def _stock_dtype(self, images: Tensor, *args, **kwargs) -> torch.dtype | None:
        """Dtype that the layer alone returns here, None if it computes in fp32 anyway.

        Found by running the layer in evaluation mode, once for each setting.
        """
        weight = next(self.layer.parameters(), images)
        autocast = torch.is_autocast_enabled(images.device.type)
        if not autocast and weight.dtype not in (torch.float16, torch.bfloat16):
            return None
        key = (
            images.device.type,
            images.dtype,
            weight.dtype,
            autocast and torch.get_autocast_dtype(images.device.type),
        )
        if key not in self._output_dtypes:
            output = self._probe(images[:1], *args, **kwargs)
            embedding = read_embedding(self.layer, images[:1], output)
            self._output_dtypes[key] = embedding.embedded.dtype
        return self._output_dtypes[key]

    @torch.no_grad()
    def _probe(self, images: Tensor, *args, **kwargs):
        # A weight that autocast casts here without a graph must not stay in its cache.
        cache = torch.is_autocast_cache_enabled()
        training = [module for module in self.layer.modules() if module.training]
        torch.set_autocast_cache_enabled(False)
        self.layer.eval()
        try:
            return _stock_forward(self.layer, images, *args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cache)
            for module in training:
                module.training = True


class _Stock(nn.Module):
    """Runs a layer's own forward, past the one that stands in for it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return _stock_forward(self.layer, *args, **kwargs)


def _stock_forward(layer: nn.Module, *args, **kwargs):
    return type(layer).forward(layer, *args, **kwargs)


_tf32_lock = Lock()
_tf32_users = 0
_tf32_before: list = []


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Turn TF32 off, which cuDNN allows by default, and restore it on leaving.

    The switches belong to the process: the first thread that enters saves them, the
    last one that leaves restores them.
    """
    global _tf32_users, _tf32_before  # noqa: PLW0603
    switches = _tf32_switches()
    with _tf32_lock:
        if _tf32_users == 0:
            _tf32_before = [getattr(owner, name) for owner, name, _ in switches]
            for owner, name, value in switches:
                setattr(owner, name, value)
        _tf32_users += 1
    try:
        yield
    finally:
        with _tf32_lock:
            _tf32_users -= 1
            if _tf32_users == 0:
                for (owner, name, _), value in zip(switches, _tf32_before, strict=True):
                    setattr(owner, name, value)


def _tf32_switches() -> list[tuple]:
    """Owner, name and IEEE value of the flags; torch 2.9 renamed them."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, 'conv'):
        name, value = 'fp32_precision', 'ieee'
        return [(cudnn.conv, name, value), (matmul, name, value)]
    return [(cudnn, 'allow_tf32', False), (matmul, 'allow_tf32', False)]
