"""The two halves of a transformer block on CPU, a chunk at a time.

A tensor of tens of MiB takes longer to allocate than to compute, and fits no cache. So
only what the backward pass needs is made whole: of the feed-forward network the hidden
layer before its activation, of attention the queries, keys and values.
"""

import torch
import torch.nn.functional as F
import torch.nn.modules.module as hooked
from mmcv.cnn.bricks.wrappers import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HIDDEN = 2**21
"""Numbers in a chunk of a hidden layer: 8 MiB in fp32, which an allocator reuses."""
SCORES = 2**20
"""Attention scores in a chunk: 4 MiB in fp32, what the L2 caches of two cores hold."""


def usable(x: Tensor, *modules: nn.Module) -> bool:
    """Whether modules may be computed here from their parameters, past their forward.

    Args:
        x (Tensor): Their input.
        *modules (nn.Module): What would be bypassed.

    Returns:
        bool: True on CPU in the parameters' own precision, where nothing watches the
        modules and none drops out.
    """
    return (
        x.is_cpu
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled('cpu')
        and all(_bare(module, x.dtype) for module in modules)
    )


def watched(module: nn.Module) -> bool:
    """Whether a hook would miss that a module is bypassed.

    Args:
        module (nn.Module): The module.

    Returns:
        bool: True if it has hooks.
    """
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
            hooked._global_forward_hooks,
            hooked._global_forward_pre_hooks,
            hooked._global_backward_hooks,
            hooked._global_backward_pre_hooks,
        )
    )


def _bare(module: nn.Module, dtype: torch.dtype) -> bool:
    if watched(module):
        return False
    if isinstance(module, nn.Dropout):
        return not (module.training and module.p)
    if isinstance(module, nn.Linear):
        return (
            type(module) in (nn.Linear, Linear)
            and module.weight.dtype == dtype
            and module.bias is not None
        )
    return type(module) is nn.GELU


class FeedForward(torch.autograd.Function):
    """Linear, GELU, Linear.

    Apply as ``FeedForward.apply(x, weight1, bias1, weight2, bias2, approximate,
    torch.is_grad_enabled())``:

    * x (Tensor): Rows. Has shape (N, D).
    * weight1, bias1 (Tensor): First layer, (H, D) and (H,).
    * weight2, bias2 (Tensor): Second layer, (D, H) and (D,).
    * approximate (str): As for ``torch.nn.GELU``.

    Returns rows (N, D).
    """

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, approximate, training):
        """Compute; arguments and result as in the class docstring."""
        hidden = x.new_empty(len(x), len(weight1)) if training else None
        out = x.new_empty(len(x), len(weight2))
        for rows in _chunks(len(x), len(weight1), HIDDEN):
            before = torch.addmm(
                bias1, x[rows], weight1.T, out=hidden[rows] if training else None
            )
            after = F.gelu(before, approximate=approximate)
            torch.addmm(bias2, after, weight2.T, out=out[rows])
        ctx.save_for_backward(x, hidden, weight1, weight2)
        ctx.approximate = approximate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients for the rows and both layers."""
        x, hidden, weight1, weight2 = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad1, grad2 = torch.zeros_like(weight1), torch.zeros_like(weight2)
        grad_bias1 = weight1.new_zeros(len(weight1))
        for rows in _chunks(len(x), len(weight1), HIDDEN):
            before = hidden[rows]
            after = F.gelu(before, approximate=ctx.approximate)
            grad2.addmm_(grad[rows].T, after)
            back = torch.ops.aten.gelu_backward(
                grad[rows] @ weight2, before, approximate=ctx.approximate
            )
            grad1.addmm_(back.T, x[rows])
            grad_bias1 += back.sum(0)
            torch.mm(back, weight1, out=grad_x[rows])
        return grad_x, grad1, grad_bias1, grad2, grad.sum(0), None, None


class WindowAttention(torch.autograd.Function):
    """Multi-head attention in windows, with its projections.

    Apply as ``WindowAttention.apply(x, weight_in, bias_in, biases, kinds, weight_out,
    bias_out, scale, torch.is_grad_enabled())``:

    * x (Tensor): Windows. Has shape (n, L, D).
    * weight_in, bias_in (Tensor): Query, key and value, (3 D, D) and (3 D,).
    * biases (Tensor): Added to the scores. Has shape (heads, L, L), or (k, heads, L, L)
      with ``kinds``.
    * kinds (Tensor | None): Which of the biases holds for each window. Has shape (n,).
    * weight_out, bias_out (Tensor): Output, (D, D) and (D,).
    * scale (float): Factor on the scores.

    Returns windows (n, L, D).
    """

    @staticmethod
    def forward(
        ctx, x, weight_in, bias_in, biases, kinds, weight_out, bias_out, scale, training
    ):
        """Attend; arguments and result as in the class docstring."""
        count, places, channels = x.shape
        heads = biases.shape[-3]
        qkv = x.new_empty(count * places, 3 * channels) if training else None
        out = torch.empty_like(x)
        for windows in _chunks(count, heads * places**2, SCORES):
            rows = slice(windows.start * places, windows.stop * places)
            projected = torch.addmm(
                bias_in,
                x[windows].flatten(0, 1),
                weight_in.T,
                out=qkv[rows] if training else None,
            )
            query, key, value = _split_heads(projected, places, heads, 3)
            weights = _weights(query, key, biases, kinds, windows, scale)
            torch.addmm(
                bias_out,
                _merge_heads((weights @ value)[None], heads),
                weight_out.T,
                out=out[windows].flatten(0, 1),
            )
        ctx.save_for_backward(x, qkv, weight_in, biases, kinds, weight_out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients for the windows, both projections and the biases."""
        x, qkv, weight_in, biases, kinds, weight_out = ctx.saved_tensors
        count, places, _ = x.shape
        heads = biases.shape[-3]
        grad_x, grad_biases = torch.empty_like(x), torch.zeros_like(biases)
        grad_in, grad_out = torch.zeros_like(weight_in), torch.zeros_like(weight_out)
        grad_bias_in = weight_in.new_zeros(len(weight_in))
        for windows in _chunks(count, heads * places**2, SCORES):
            rows = slice(windows.start * places, windows.stop * places)
            heads_of = _split_heads(qkv[rows], places, heads, 3)
            query, key, value = heads_of
            weights = _weights(query, key, biases, kinds, windows, ctx.scale)
            attended = weights @ value
            incoming = grad[windows].flatten(0, 1)
            grad_out.addmm_(incoming.T, _merge_heads(attended[None], heads))
            back = _split_heads(incoming @ weight_out, places, heads, 1)[0]
            grads = torch.empty_like(heads_of)
            torch.bmm(weights.mT, back, out=grads[2])
            scores = (back @ value.mT).sub_((back * attended).sum(-1, keepdim=True))
            scores.mul_(weights)
            by_head = scores.view(-1, heads, places, places)
            if kinds is None:
                grad_biases += by_head.sum(0)
            else:
                grad_biases.index_add_(0, kinds[windows], by_head)
            scores.mul_(ctx.scale)
            torch.bmm(scores, key, out=grads[0])
            torch.bmm(scores.mT, query, out=grads[1])
            back = _merge_heads(grads, heads)
            grad_in.addmm_(back.T, x[windows].flatten(0, 1))
            grad_bias_in += back.sum(0)
            torch.mm(back, weight_in, out=grad_x[windows].flatten(0, 1))
        grad_bias_out = grad.sum((0, 1))
        return (
            grad_x,
            grad_in,
            grad_bias_in,
            grad_biases,
            None,
            grad_out,
            grad_bias_out,
            None,
            None,
        )


class GridAttention(torch.autograd.Function):
    """Multi-head attention over maps with decomposed relative positions.

    To the score of query (y, x) and key (r, c) it adds q . rows[y, r] and
    q . columns[x, c] (MViTv2, arXiv 2112.01526), with q before scaling.

    Apply as ``GridAttention.apply(qkv, rows, columns, scale)``:

    * qkv (Tensor): Queries, keys and values. Has shape (n, H * W, 3, heads, d).
    * rows (Tensor): Position vectors. Has shape (H, H, d).
    * columns (Tensor): Position vectors. Has shape (W, W, d).
    * scale (float): Factor on the scores.

    Returns attended values (n, H * W, heads * d).
    """

    @staticmethod
    def forward(ctx, qkv, rows, columns, scale):
        """Attend; arguments and result as in the class docstring."""
        count, places, _, heads, _ = qkv.shape
        by_head = _split_heads(qkv.flatten(2).flatten(0, 1), places, heads, 3)
        out = torch.empty_like(by_head[2])
        for group, lines in _grid_chunks(by_head, rows, columns):
            query, key = by_head[0, group, lines], by_head[1, group]
            weights, _ = _grid_weights(query, key, rows, columns, lines, scale)
            torch.bmm(weights, by_head[2, group], out=out[group, lines])
        out = _merge_heads(out[None], heads).view(count, places, -1)
        ctx.save_for_backward(by_head, rows, columns, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients for qkv and the position vectors."""
        by_head, rows, columns, out = ctx.saved_tensors
        count, places = out.shape[:2]
        heads = by_head.shape[1] // count
        size = (len(rows), len(columns))
        mean = (grad * out).view(count, places, heads, -1).sum(-1).mT.flatten(0, 1)
        grad = _split_heads(grad.flatten(0, 1), places, heads, 1)[0]
        grads = torch.zeros_like(by_head)
        grad_rows, grad_columns = torch.zeros_like(rows), torch.zeros_like(columns)
        for group, lines in _grid_chunks(by_head, rows, columns):
            query, key, value = by_head[0, group, lines], *by_head[1:, group]
            weights, grid = _grid_weights(query, key, rows, columns, lines, ctx.scale)
            incoming = grad[group, lines]
            grads[2, group] += weights.mT @ incoming
            scores = (incoming @ value.mT).sub_(mean[group, lines, None]).mul_(weights)
            of_grid = scores.view(*grid.shape[:3], *size)
            rows_of = slice(lines.start // size[1], lines.stop // size[1])
            to_rows, to_columns = of_grid.sum(-1), of_grid.sum(-2)
            grad_rows[rows_of] += torch.einsum('gyxk,gyxc->ykc', to_rows, grid)
            grad_columns += torch.einsum('gyxk,gyxc->xkc', to_columns, grid)
            back = torch.einsum('gyxk,ykc->gyxc', to_rows, rows[rows_of])
            back += torch.einsum('gyxk,xkc->gyxc', to_columns, columns)
            scores.mul_(ctx.scale)
            grads[0, group, lines] = back.flatten(1, 2).baddbmm_(scores, key)
            grads[1, group] += scores.mT @ query
        grads = _merge_heads(grads, heads).view(count, places, 3, heads, -1)
        return grads, grad_rows, grad_columns, None


def _grid_chunks(by_head: Tensor, rows: Tensor, columns: Tensor):
    """Groups of (image, head) and, in them, whole lines of queries."""
    places = by_head.shape[2]
    step = max(1, SCORES // (len(columns) * places)) * len(columns)
    for group in _chunks(by_head.shape[1], places**2, SCORES):
        for first in range(0, places, step):
            yield group, slice(first, min(first + step, places))


def _grid_weights(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    columns: Tensor,
    lines: slice,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Weights (g, r * W, H * W) of r lines of queries, and those (g, r, W, d)."""
    width = len(columns)
    grid = query.unflatten(1, (-1, width))
    rows = rows[lines.start // width : lines.stop // width]
    to_rows = torch.einsum('gyxc,ykc->gyxk', grid, rows)
    to_columns = torch.einsum('gyxc,xkc->gyxk', grid, columns)
    scores = (query @ key.mT).mul_(scale)
    of_grid = scores.view(*grid.shape[:3], -1, width)
    of_grid.add_(to_rows[..., None]).add_(to_columns[..., None, :])
    return scores.softmax(-1), grid


def _chunks(count: int, size: int, limit: int) -> list[slice]:
    step = max(1, limit // size)
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _split_heads(rows: Tensor, places: int, heads: int, parts: int) -> Tensor:
    """From (c * L, parts * heads * d) to (parts, c * heads, L, d)."""
    split = rows.view(-1, places, parts, heads, rows.shape[-1] // (parts * heads))
    return split.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _merge_heads(split: Tensor, heads: int) -> Tensor:
    """From (parts, c * heads, L, d) back to (c * L, parts * heads * d)."""
    merged = split.unflatten(1, (-1, heads)).permute(1, 3, 0, 2, 4)
    return merged.flatten(0, 1).flatten(1)


def _weights(
    query: Tensor,
    key: Tensor,
    biases: Tensor,
    kinds: Tensor | None,
    windows: slice,
    scale: float,
) -> Tensor:
    """Attention weights (c * heads, L, L)."""
    scores = (query @ key.mT).mul_(scale)
    if kinds is not None:
        biases = biases.index_select(0, kinds[windows])
    scores.view(-1, *biases.shape[-3:]).add_(biases)
    return scores.softmax(-1)
