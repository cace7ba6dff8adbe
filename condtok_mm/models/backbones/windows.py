"""Windows of a map: one gather in, one gather out, planned once for each size."""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CROSSING = -100.0
"""Added to the score of two tokens that a cyclic shift has brought together."""
CACHED_SIZES = 64
"""Plans that are kept: sizes of maps times stages, with and without a shift."""


class WindowPlan(NamedTuple):
    """Where the tokens of a map go when it is cut into nW windows of L places.

    Attributes:
        gather (Tensor): Which token comes to each place. Has shape (nW * L,).
        filled (Tensor | None): Whether a token comes to each place, boolean; the map
            is padded to whole windows. None if all are filled. Has shape (nW * L, 1).
        scatter (Tensor): Place that each token goes to. Has shape (H * W,).
        kinds (Tensor | None): Which of ``masks`` holds for each window (nW,), or None
            without a shift.
        masks (Tensor): Additive attention masks of a window inside the map, at its
            right edge, at its bottom and in its corner. Has shape (4, L, L).
    """

    gather: Tensor
    filled: Tensor | None
    scatter: Tensor
    kinds: Tensor | None
    masks: Tensor


def window_plan(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> WindowPlan:
    """Plan the windows of a map. A plan is made once and kept.

    Args:
        height (int): Rows of the map in tokens.
        width (int): Columns of the map in tokens.
        window (int): Side of a window in tokens.
        shift (int): Cyclic shift to the top left in tokens, less than ``window``.
        device (torch.device): Where the tensors of the plan lie.

    Returns:
        WindowPlan: The plan.
    """
    if torch.compiler.is_compiling():
        return _make_plan(height, width, window, shift, device)
    return _cached_plan(height, width, window, shift, device)


@lru_cache(CACHED_SIZES)
def _cached_plan(height, width, window, shift, device) -> WindowPlan:
    # A tensor that is made in inference mode cannot be used in training later.
    with torch.inference_mode(False):
        plan = _make_plan(height, width, window, shift, device)
    if height % window == 0 and width % window == 0:
        return plan._replace(filled=None)
    return plan


def _make_plan(height, width, window, shift, device) -> WindowPlan:
    # Rounded up without a negative number, whose quotient ONNX rounds towards zero.
    down, across = (height + window - 1) // window, (width + window - 1) // window
    rows, columns = down * window, across * window
    token = torch.arange(height * width, device=device).view(height, width)
    token = F.pad(token, (0, columns - width, 0, rows - height), value=-1)
    token = token.roll((-shift, -shift), (0, 1)).view(down, window, across, window)
    token = token.transpose(1, 2).flatten()
    place = torch.arange(rows * columns, device=device)
    place = place.view(down, across, window, window).transpose(1, 2)
    place = place.reshape(rows, columns).roll((shift, shift), (0, 1))

    at_bottom = torch.arange(down, device=device).flip(0) == 0
    at_right = torch.arange(across, device=device).flip(0) == 0
    wrapped = torch.arange(window, device=device) >= window - shift
    apart = wrapped[:, None] ^ wrapped
    rows_apart = apart[:, None, :, None].expand(4 * (window,))
    columns_apart = apart[None, :, None, :].expand(4 * (window,))
    masks = torch.stack(
        (
            torch.zeros_like(rows_apart),
            columns_apart,
            rows_apart,
            rows_apart | columns_apart,
        )
    )
    return WindowPlan(
        gather=token.clamp_min(0),
        filled=token[:, None] >= 0,
        scatter=place.narrow(0, 0, height).narrow(1, 0, width).flatten(),
        kinds=(2 * at_bottom[:, None] + at_right).flatten() if shift else None,
        masks=CROSSING * masks.reshape(4, window**2, window**2),
    )


class Regroup(torch.autograd.Function):
    """Move tokens to other places; what goes to no place twice comes back by a gather.

    Apply as ``Regroup.apply(tokens, forth, back, filled, filled_back)``:

    * tokens (Tensor): Has shape (B, N, D).
    * forth (Tensor): Token that comes to each of M places. Has shape (M,).
    * back (Tensor): Place that each token went to. Has shape (N,).
    * filled (Tensor | None): Places that keep their token, boolean (M, 1); others
      become zero.
    * filled_back (Tensor | None): The same of the way back, (N, 1).

    Returns the tokens (B, M, D).
    """

    @staticmethod
    def forward(ctx, tokens, forth, back, filled, filled_back):
        """Gather; arguments and result as in the class docstring."""
        ctx.save_for_backward(back, filled_back)
        return _take(tokens, forth, filled)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradient for the tokens: the way back."""
        back, filled_back = ctx.saved_tensors
        return _take(grad, back, filled_back), None, None, None, None


def _regroup(tokens, forth, back, filled, filled_back) -> Tensor:
    if torch.jit.is_tracing():
        return _take(tokens, forth, filled)
    return Regroup.apply(tokens, forth, back, filled, filled_back)


def _take(tokens: Tensor, index: Tensor, filled: Tensor | None) -> Tensor:
    taken = tokens.index_select(1, index)
    return taken if filled is None else taken.mul_(filled)


def to_windows(tokens: Tensor, plan: WindowPlan) -> Tensor:
    """Cut maps into windows.

    Args:
        tokens (Tensor): Tokens of maps, row by row. Has shape (B, H * W, D).
        plan (WindowPlan): Plan for H and W.

    Returns:
        Tensor: Windows (B * nW, L, D), image by image; empty places are zero.
    """
    places = plan.masks.shape[-1]
    windows = _regroup(tokens, plan.gather, plan.scatter, plan.filled, None)
    return windows.reshape(-1, places, tokens.shape[-1])


def from_windows(windows: Tensor, plan: WindowPlan, batch: int) -> Tensor:
    """Put windows together again.

    Args:
        windows (Tensor): Windows. Has shape (B * nW, L, D).
        plan (WindowPlan): Plan that they were cut by.
        batch (int): Images B.

    Returns:
        Tensor: Tokens of maps (B, H * W, D).
    """
    windows = windows.reshape(batch, -1, windows.shape[-1])
    return _regroup(windows, plan.scatter, plan.gather, None, plan.filled)


def window_biases(
    bias: Tensor, plan: WindowPlan, batch: int
) -> tuple[Tensor, Tensor | None]:
    """Position bias and shift mask as one additive mask for each kind of window.

    Args:
        bias (Tensor): Relative position bias. Has shape (heads, L, L).
        plan (WindowPlan): Plan that the windows were cut by.
        batch (int): Images B.

    Returns:
        tuple[Tensor, Tensor | None]: The bias (heads, L, L) and None without a shift;
        with one the masks (4, heads, L, L), and which holds for each window (B * nW,).
    """
    if plan.kinds is None:
        return bias, None
    return bias + plan.masks[:, None].to(bias.dtype), plan.kinds.repeat(batch)
