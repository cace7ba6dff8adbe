"""What the attention layers of a backbone work on: read by hooks, formed in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..models.backbones.positions import relative_positions
from ..models.backbones.swin import FusedShiftWindowMSA
from ..models.backbones.vit import Attention
from ..models.backbones.windows import to_windows, window_biases, window_plan

MAX_DIFFERENCE = 1e-3
"""Relative difference to the layer's own output up to which a reading is right."""
OTHER_KIND = (
    'does not compute softmax(Q K^T / sqrt(d) + positions) V as ViT and Swin do, so '
    'its attention cannot be read; cross-covariance attention, as in XCiT, and cosine '
    'attention are of another kind.'
)
"""What is wrong with a layer that differs from its reading."""


@dataclass
class AttentionLayer:
    """Float64 matrices of one attention layer for one image, n windows of N tokens.

    Attributes:
        name (str): Dotted name of the layer.
        tokens (Tensor): Normed input X. Has shape (n, N, D).
        weights (Tensor): Wq, Wk and Wv of each head. Has shape (3, heads, D, d).
        query (Tensor): Scaled queries, with positions on further channels where the
            layer has them so. Has shape (n, heads, N, e).
        key (Tensor): Keys that go with them. Has shape (n, heads, N, e).
        value (Tensor): Values. Has shape (n, heads, N, d).
        bias (Tensor | None): Added to the scores. Has shape (n or 1, heads, N, N).
        output (Tensor): Attention output of the layer itself, heads side by side. Has
            shape (n, N, heads * d).
        filled (Tensor | None): Places of ``output`` that hold a token, boolean. Has
            shape (n, N, 1).
    """

    name: str
    tokens: Tensor
    weights: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    output: Tensor
    filled: Tensor | None

    def matrix(self, head: int) -> Tensor:
        """Attention matrix S.

        Args:
            head (int): Which head.

        Returns:
            Tensor: Matrices (n, N, N).
        """
        scores = self.query[:, head] @ self.key[:, head].mT
        if self.bias is not None:
            scores = scores + self.bias[:, head]
        return scores.softmax(-1)

    def check(self) -> None:
        """Compare S V with what the layer itself made of V.

        Raises:
            ValueError: If they differ: the attention of the layer is of another kind.
        """
        heads = range(self.value.shape[1])
        attended = [self.matrix(head) @ self.value[:, head] for head in heads]
        attended = torch.cat(attended, -1)
        if attended.shape == self.output.shape:
            filled = 1 if self.filled is None else self.filled
            difference = (attended - self.output) * filled
            # Not "<=", so that inf and nan pass: they are seen in what is measured.
            if not difference.norm() > MAX_DIFFERENCE * self.output.norm():
                return
        raise ValueError(f'{self.name} {OTHER_KIND}')


def attention_layers(backbone: nn.Module) -> dict[str, nn.Module]:
    """Find the attention layers that project to query, key and value at once.

    Args:
        backbone (nn.Module): Any backbone.

    Returns:
        dict[str, nn.Module]: Layers by their dotted names, in order. Those of Swin are
        the ones that make the windows.

    Raises:
        ValueError: If there is none.
    """
    modules = dict(backbone.named_modules())
    layers = {
        name.removesuffix('.w_msa'): modules[name.removesuffix('.w_msa')]
        for name, module in modules.items()
        if isinstance(getattr(module, 'qkv', None), nn.Linear)
        and isinstance(getattr(module, 'proj', None), nn.Linear)
        and hasattr(module, 'num_heads')
        and module.qkv.out_features == 3 * module.proj.in_features
    }
    if not layers:
        raise ValueError(
            f'{type(backbone).__name__} has no attention layer with a projection qkv '
            'to query, key and value at once; only such layers can be read.'
        )
    return layers


@torch.no_grad()
def read_attention(
    backbone: nn.Module, image: Tensor, max_windows: int = 16
) -> Iterator[AttentionLayer]:
    """Read what the attention layers of a backbone work on.

    Args:
        backbone (nn.Module): A backbone in evaluation mode.
        image (Tensor): Normalised image. Has shape (1, C, H, W).
        max_windows (int): Windows of a layer that are read, evenly spaced. Defaults to
            16.

    Yields:
        AttentionLayer: The layers that have run, in order.

    Raises:
        ValueError: If there is none, or one whose attention is of another kind.
    """
    layers = attention_layers(backbone)
    seen = {name: {} for name in layers}
    handles = []
    for name, layer in layers.items():
        msa = getattr(layer, 'w_msa', layer)
        for key, module in (('call', layer), ('tokens', msa.qkv), ('output', msa.proj)):
            hook = partial(_keep, seen[name], key)
            handles.append(module.register_forward_pre_hook(hook))
    try:
        backbone(image)
    finally:
        for handle in handles:
            handle.remove()
    for name, layer in layers.items():
        if seen[name]:
            read = _read(name, layer, max_windows, **seen.pop(name))
            read.check()
            yield read


def _keep(record: dict, key: str, module: nn.Module, args: tuple) -> None:
    record[key] = args


def _read(
    name: str,
    layer: nn.Module,
    max_windows: int,
    call: tuple,
    tokens: tuple,
    output: tuple,
) -> AttentionLayer:
    """Form the matrices from what the layer, its qkv and its proj were called with."""
    msa = getattr(layer, 'w_msa', layer)
    X, own = tokens[0].flatten(1, -2), output[0].flatten(1, -2)
    count = len(X)
    chosen = torch.linspace(0, count - 1, min(count, max_windows)).round().long()
    X = X[chosen].double()
    weights = msa.qkv.weight.double().unflatten(0, (3, msa.num_heads, -1)).mT
    parts = X[None, :, None] @ weights[:, None]
    if msa.qkv.bias is not None:
        parts = parts + msa.qkv.bias.double().view(3, 1, msa.num_heads, 1, -1)
    query, key, value = parts
    bias = filled = None
    if isinstance(layer, Attention):
        own, filled, grid = _own_windows(own, *call[1:])
        filled = None if filled is None else filled[chosen]
        query, key = _with_positions(layer, query, key, grid)
    else:
        query = query * getattr(msa, 'scale', weights.shape[-1] ** -0.5)
        if hasattr(layer, 'w_msa') and hasattr(msa, 'relative_position_bias_table'):
            bias = _window_bias(layer, call[1], chosen)
    if len(own) != count:
        raise ValueError(f'{name} {OTHER_KIND}')
    return AttentionLayer(
        name=name,
        tokens=X,
        weights=weights,
        query=query,
        key=key,
        value=value,
        bias=bias,
        output=own[chosen].double(),
        filled=filled,
    )


def _own_windows(
    output: Tensor, hw: tuple[int, int], window: int
) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """Windows of our ViT's output, which of their places are filled, and their grid."""
    if not window:
        return output, None, hw
    plan = window_plan(*hw, window, 0, output.device)
    filled = None if plan.filled is None else plan.filled.view(-1, window**2, 1)
    return to_windows(output, plan), filled, (window, window)


def _with_positions(
    layer: Attention, query: Tensor, key: Tensor, grid: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Scaled queries, and keys, of our ViT; with relative positions if it has them."""
    if not layer.use_rel_pos:
        return query * layer.scale, key
    tables = zip((layer.rel_pos_h, layer.rel_pos_w), grid, strict=True)
    positions = (relative_positions(*pair).double() for pair in tables)
    return layer._add_positions(query, key, *positions)


def _window_bias(layer: nn.Module, hw: tuple[int, int], chosen: Tensor) -> Tensor:
    """Relative positions and shift masks of Swin's windows, (n or 1, heads, N, N)."""
    bias = FusedShiftWindowMSA._bias(layer)
    plan = window_plan(*hw, layer.window_size, layer.shift_size, bias.device)
    biases, kinds = window_biases(bias, plan, 1)
    return (biases[None] if kinds is None else biases[kinds[chosen]]).double()
