"""Numerical rank and condition number of token matrices."""

import math

import torch
from torch import Tensor

from ..arguments import check_number
from .polar import GRAM_RTOL, SPECTRA


def check_tokens(tokens: Tensor, valid: Tensor | None) -> None:
    """Raise unless ``tokens`` and ``valid`` are what this package works on.

    Args:
        tokens (Tensor): Token matrices. Has shape (B, N, D).
        valid (Tensor | None): Which tokens count. Has shape (B, N).

    Raises:
        TypeError: If tokens are not floating point, or ``valid`` is not boolean.
        ValueError: If the shapes are not as above.
    """
    if not torch.is_tensor(tokens) or not tokens.is_floating_point():
        kind = tokens.dtype if torch.is_tensor(tokens) else type(tokens).__name__
        raise TypeError(f'tokens must be a floating point tensor, but got {kind}.')
    if tokens.dim() != 3:
        shape = tuple(tokens.shape)
        raise ValueError(f'tokens must have shape (B, N, D), but got {shape}.')
    if valid is None:
        return
    if not torch.is_tensor(valid) or valid.dtype != torch.bool:
        kind = valid.dtype if torch.is_tensor(valid) else type(valid).__name__
        raise TypeError(f'valid must be a boolean tensor, but got {kind}.')
    if valid.shape != tokens.shape[:2]:
        raise ValueError(
            f'valid must have shape (B, N) = {tuple(tokens.shape[:2])} as the tokens '
            f'do, but got {tuple(valid.shape)}.'
        )


def default_rtol(dtype: torch.dtype) -> float:
    """Numerical range of tokens, 4 eps of the dtype that they are computed in.

    Args:
        dtype (torch.dtype): The tokens' dtype. Half precisions are computed in fp32.

    Returns:
        float: Ratio to the largest singular value (dimensionless): 4.8e-7 up to
        fp32, 8.9e-16 in fp64.
    """
    return 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def singular_values(
    tokens: Tensor, valid: Tensor | None = None, rtol: float | None = None
) -> Tensor:
    """Singular values of each token matrix.

    Args:
        tokens (Tensor): Token matrices. Has shape (B, N, D).
        valid (Tensor, optional): Tokens that count, boolean. Has shape (B, N).
            Defaults to None, which counts all.
        rtol (float, optional): Smallest ratio to the largest value (dimensionless)
            that must be right. Defaults to None, which is 4 eps of the tokens' dtype,
            fp32 at least.

    Returns:
        Tensor: Values in float64, in the unit of the tokens and descending. Has shape
        (B, min(N, D)). Tokens that hold inf or nan give nan.

    Raises:
        TypeError: If tokens are not floating point, or ``valid`` is not boolean.
        ValueError: If a shape is wrong.
    """
    check_tokens(tokens, valid)
    rtol = _range(tokens.dtype, rtol)
    if tokens.numel() == 0:
        return tokens.new_zeros(len(tokens), 1, dtype=torch.float64)
    rows = tokens.detach().double()
    if valid is not None:
        rows = torch.where(valid.unsqueeze(-1), rows, 0)
    scale, finite = entry_scale(rows)
    rows = torch.where(finite, rows, 0) / scale
    rows = rows if rows.shape[1] >= rows.shape[2] else rows.mT
    values, _ = SPECTRA['eigh' if rtol >= GRAM_RTOL else 'svd'](rows)
    values = values.sort(descending=True).values * scale.squeeze(-1)
    return torch.where(finite.squeeze(-1), values, torch.nan)


def _range(dtype: torch.dtype, rtol: float | None) -> float:
    if rtol is None:
        return default_rtol(dtype)
    check_number('rtol', rtol, '(0, 1)')
    return rtol


def condition_number(
    tokens: Tensor, valid: Tensor | None = None, rtol: float | None = None
) -> tuple[Tensor, Tensor]:
    """Condition number and rank of each token matrix over its numerical range.

    kappa = s_1 / s_r with s_r the smallest singular value above ``rtol * s_1``, and r
    the number of those: the condition number of arXiv 2505.12789, restricted to the
    directions that hold more than rounding noise.

    Args:
        tokens (Tensor): Token matrices. Has shape (B, N, D).
        valid (Tensor, optional): Tokens that count, boolean. Has shape (B, N).
            Defaults to None, which counts all.
        rtol (float, optional): Numerical range as a fraction of s_1 (dimensionless).
            Defaults to None, which is 4 eps of the tokens' dtype, fp32 at least.

    Returns:
        tuple[Tensor, Tensor]: kappa (B,), dimensionless, in the tokens' dtype (fp32
        at least), and the rank (B,), an integer. Zero tokens give (1, 0), tokens that
        hold inf or nan (nan, 0).

    Raises:
        TypeError: If tokens are not floating point, or ``valid`` is not boolean.
        ValueError: If a shape is wrong or ``rtol`` does not lie in (0, 1).
    """
    values = singular_values(tokens, valid, rtol)
    rank = numerical_rank(values, _range(tokens.dtype, rtol))
    top = values[:, 0]
    ratio = condition_over(values, rank.clamp_min(1))
    kappa = torch.where(rank > 0, ratio, torch.where(top.isnan(), top, 1))
    return kappa.to(torch.promote_types(tokens.dtype, torch.float32)), rank


def condition_over(values: Tensor, count: Tensor) -> Tensor:
    """Condition number over the first directions.

    Args:
        values (Tensor): Singular values, descending. Has shape (B, K).
        count (Tensor): Number n of directions of each matrix, at least 1. Has shape
            (B,).

    Returns:
        Tensor: s_1 / s_n (B,), dimensionless.
    """
    return values[:, 0] / values.gather(1, count[:, None] - 1)[:, 0]


def numerical_rank(values: Tensor, rtol: float) -> Tensor:
    """Count the singular values of each matrix that lie in its numerical range.

    Args:
        values (Tensor): Singular values, descending. Has shape (B, K).
        rtol (float): Numerical range as a fraction of the largest (dimensionless).

    Returns:
        Tensor: Rank (B,), an integer; 0 for zero matrices and for nan.
    """
    return (values > rtol * values[:, :1]).sum(-1)


def entry_scale(rows: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scale that brings the valid entries of each matrix to at most two.

    Without it a square of tokens may over- or underflow.

    Args:
        rows (Tensor): Matrices. Has shape (B, M, K), not empty.
        valid (Tensor, optional): Rows that count, boolean. Has shape (B, M). Defaults
            to None, which counts all.

    Returns:
        tuple[Tensor, Tensor]: What to divide by (B, 1, 1), a constant for the gradient
        and a power of two, so that nothing is rounded; and whether all entries are
        finite (B, 1, 1), boolean. Where they are not, the scale is one.
    """
    if valid is None:
        largest = largest_entry(rows)
        finite = largest.isfinite()
    else:
        by_row = largest_entry(rows, (-1,))
        largest = torch.where(valid.unsqueeze(-1), by_row, 0).amax(1, keepdim=True)
        finite = by_row.isfinite().all(1, keepdim=True)
    _, limit = math.frexp(torch.finfo(rows.dtype).max)
    exponent = torch.where(finite, largest, 1).log2().floor()
    return exponent.clamp(2 - limit, limit - 2).exp2(), finite


def largest_entry(rows: Tensor, axes: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Largest magnitude in each matrix or row, a constant for the gradient.

    Args:
        rows (Tensor): Matrices. Has shape (B, M, K), not empty.
        axes (tuple[int, ...]): What to reduce. Defaults to (-2, -1), whole matrices.

    Returns:
        Tensor: Magnitudes (B, 1, 1), or (B, M, 1); nan where there is nan.
    """
    rows = rows.detach()
    return torch.maximum(rows.amax(axes, keepdim=True), -rows.amin(axes, keepdim=True))
