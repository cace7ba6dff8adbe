"""The polar factor of token matrices on their numerical range.

For rows X = U S V^T the product X R with R = V h(S) V^T is the polar factor
U V^T of X when h(s) = 1 / s. With a noise floor rho, h(s) = 1 / sqrt(s^2 + (rho
s_1)^2), and directions well below rho s_1 fade out. The first is the construction
of Saratchandran and Lucey (arXiv 2505.12789), the floor is this project's addition.

A Gram matrix squares the condition number: one in fp32 loses every direction below
3e-4 of the largest. So all is float64, unless a floor of at least ``FP32_FLOOR`` bounds
the condition number, or the solver makes several passes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .newton_schulz import PASS_FLOOR, newton_schulz

GRAM_RTOL = 4 * torch.finfo(torch.float32).eps
"""Smallest ratio s / s_1 (dimensionless) that a float64 Gram matrix resolves well."""

FP32_FLOOR = 0.03
"""Smallest floor (dimensionless) for which an fp32 Gram matrix is enough.

C is then right to 5e-5, and to 1e-5 at 0.1."""


def svd_spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors from an SVD, the reference.

    Args:
        rows (Tensor): Matrices. Has shape (B, M, K).

    Returns:
        tuple[Tensor, Tensor]: Singular values (B, K) and, in columns, an orthonormal
        basis (B, K, K).
    """
    count, width = rows.shape[-2:]
    _, values, basis = _factorise(
        lambda matrix: torch.linalg.svd(matrix, full_matrices=count < width), rows
    )
    missing = width - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)), basis.mT


def eigh_spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors from the Gram matrix.

    Args:
        rows (Tensor): Matrices. Has shape (B, M, K).

    Returns:
        tuple[Tensor, Tensor]: Singular values (B, K) and, in columns, an orthonormal
        basis (B, K, K). Values below ``GRAM_RTOL`` of the largest are rounding noise.
    """
    return gram_spectrum(rows.mT @ rows)


def gram_spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The same from X^T X itself.

    Args:
        gram (Tensor): Gram matrices. Has shape (..., K, K).

    Returns:
        tuple[Tensor, Tensor]: Singular values (..., K) of X, and the basis (..., K, K).
    """
    eigenvalues, basis = _factorise(torch.linalg.eigh, gram)
    return eigenvalues.clamp_min(0).sqrt(), basis


def spectrum_gains(values: Tensor, floor: float, rtol: float) -> tuple[Tensor, Tensor]:
    """h(s) of the polar factor, and the largest singular value.

    Args:
        values (Tensor): Singular values. Has shape (..., K).
        floor (float): Noise floor rho, a fraction of s_1 (dimensionless).
        rtol (float): With ``floor <= rtol``, h is zero up to rtol * s_1.

    Returns:
        tuple[Tensor, Tensor]: h (..., K), and s_1 (..., 1).
    """
    top = values.amax(-1, keepdim=True)
    kept = values > rtol * top if floor <= rtol else (top > 0).expand_as(values)
    roots = (values.square() + (floor * top).square()).sqrt()
    return torch.where(kept, 1 / torch.where(kept, roots, 1), 0), top


SPECTRA: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    'svd': svd_spectrum,
    'eigh': eigh_spectrum,
}
SOLVERS = (*SPECTRA, 'newton_schulz')


def choose_solver(tokens: Tensor, floor: float, rtol: float, constant: bool) -> str:
    """The solver that ``solver='auto'`` stands for.

    Args:
        tokens (Tensor): Token matrices. Has shape (B, N, D).
        floor (float): Noise floor, a fraction of s_1 (dimensionless).
        rtol (float): Numerical range as a fraction of s_1 (dimensionless).
        constant (bool): Whether C is a constant for the gradient.

    Returns:
        str: Key of ``SOLVERS``; the reasons are in the docstring of TokenConditioner.
    """
    if rtol < GRAM_RTOL and floor <= rtol:
        return 'svd'
    products = constant or floor >= PASS_FLOOR
    return 'newton_schulz' if products and not tokens.is_cpu else 'eigh'


def compute_dtype(solver: str, dtype: torch.dtype, floor: float) -> torch.dtype:
    """Dtype that a solver works in.

    Args:
        solver (str): Key of ``SOLVERS``.
        dtype (torch.dtype): Dtype of the tokens.
        floor (float): Noise floor, a fraction of s_1 (dimensionless).

    Returns:
        torch.dtype: fp32 where that is enough, and float64 otherwise.
    """
    enough = solver == 'newton_schulz' or (solver == 'eigh' and floor >= FP32_FLOOR)
    return torch.promote_types(dtype, torch.float32 if enough else torch.float64)


def polar_factor(
    rows: Tensor, solver: str, floor: float, rtol: float, constant_root: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Polar factor U f(S) V^T of rows = U S V^T, as a product, and s_1.

    f(s) = s / sqrt(s^2 + (floor s_1)^2), or, where ``floor <= rtol``, 1 for s above
    rtol s_1 and 0 below.

    Args:
        rows (Tensor): Matrices with entries of at most about one, in the dtype that
            :func:`compute_dtype` names. Has shape (B, M, K).
        solver (str): Key of ``SOLVERS``.
        floor (float): Noise floor, a fraction of s_1 (dimensionless).
        rtol (float): Numerical range as a fraction of s_1 (dimensionless).
        constant_root (bool): Whether the K x K matrix that multiplies the rows is a
            constant for the gradient.

    Returns:
        tuple[Tensor, Tensor, Tensor]: Matrices (B, M, K) and (B, K, K) whose product
        is the factor, and s_1 (B, 1, 1).
    """
    if solver == 'newton_schulz':
        return newton_schulz(rows, floor, rtol, constant_root)
    root, top = InverseRoot.apply(
        rows.detach() if constant_root else rows, solver, floor, rtol
    )
    return rows, root, top[:, None, None]


class InverseRoot(torch.autograd.Function):
    """R = V h(S) V^T and s_1 of a batch of matrices, differentiable everywhere.

    The derivative is the Daleckii-Krein formula with the divided differences of h
    written without a subtraction, so that repeated and vanishing singular values,
    where the derivative of an SVD does not exist, give finite gradients.

    Apply as ``InverseRoot.apply(rows, solver, floor, rtol)``:

    * rows (Tensor): Matrices. Has shape (B, M, K).
    * solver (str): Key of ``SPECTRA``.
    * floor (float): Noise floor rho, a fraction of s_1 (dimensionless).
    * rtol (float): With ``floor <= rtol``, singular values of at most rtol * s_1
      are outside the numerical range and h is zero there. A larger floor has
      already faded them out.

    Returns the tuple R (B, K, K), s_1 (B,).
    """

    @staticmethod
    def forward(ctx, rows, solver, floor, rtol):
        """Compute R and s_1; arguments and result as in the class docstring."""
        values, basis = SPECTRA[solver](rows)
        gains, top = spectrum_gains(values, floor, rtol)
        ctx.save_for_backward(rows, values, basis, gains)
        ctx.floor = floor
        return (basis * gains.unsqueeze(-2)) @ basis.mT, top.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_root, grad_top):
        """Gradient for the rows; the other arguments are constants."""
        rows, values, basis, gains = ctx.saved_tensors
        inner = basis.mT @ ((grad_root + grad_root.mT) / 2) @ basis
        inner = inner * _divided_differences(gains)
        top, index = values.max(-1)
        grad_top_squared = ctx.floor**2 * inner.diagonal(dim1=-2, dim2=-1).sum(-1)
        grad_top_squared += torch.where(top > 0, grad_top / (2 * top), 0)
        peak = torch.nn.functional.one_hot(index, values.shape[-1])
        inner = inner + torch.diag_embed(peak * grad_top_squared.unsqueeze(-1))
        return 2 * rows @ (basis @ inner @ basis.mT), None, None, None


def _divided_differences(gains: Tensor) -> Tensor:
    """(h_i - h_j) / (s_i^2 - s_j^2) for h = 1 / sqrt(s^2 + c), and 0 off the range."""
    rows, columns = gains.unsqueeze(-1), gains.unsqueeze(-2)
    total = rows + columns
    inside = (rows > 0) & (columns > 0)
    both = -(rows * columns).square() / torch.where(inside, total, 1)
    return torch.where(inside, both, total**3)


def _factorise(factorise: Callable, matrix: Tensor) -> tuple[Tensor, ...]:
    """Factorise on the matrix's device, and on the CPU if the device fails."""
    try:
        return tuple(factorise(matrix))
    except torch.linalg.LinAlgError:
        return tuple(part.to(matrix.device) for part in factorise(matrix.cpu()))
