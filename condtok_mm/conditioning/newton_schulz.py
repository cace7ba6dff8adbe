"""The polar factor by matrix products alone: no eigh, no SVD, no fp64.

Each step multiplies by the cubic p(x) = a x (3 - (a x)^2) / 2 whose slope a is the best
one for the interval that the singular values are known to lie in (Chen and Chow, 2014;
the case of degree 3 of Polar Express, Amsel et al., arXiv 2505.16932). The number of
steps follows from the floor, so nothing is read back from the device:

======  ====================  =====================  ====================
floor   steps for 1e-4 in C   steps of plain a = 1   steps taken here
======  ====================  =====================  ====================
0.03    7                     12                     7
0.1     5                     9                      6
0.3     4                     6                      5
======  ====================  =====================  ====================

One Gram matrix in fp32 resolves singular values down to about 1e-3 of the largest.
Where more is asked for, the same is done again to the rows that a pass has brought
closer together.
"""

import math

import torch
from torch import Tensor

PASS_FLOOR = 0.02
"""Smallest floor (dimensionless) that one pass goes down to."""
TOLERANCE = 2e-6
"""Distance from 1 at which a singular value has converged."""
SQUARINGS = 8
"""Squarings of the Gram matrix; two products with a column follow: the power 768."""


def newton_schulz(
    rows: Tensor, floor: float, rtol: float, constant_root: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Polar factor U f(S) V^T of rows = U S V^T, as a product, and s_1.

    f(s) = s / sqrt(s^2 + (floor s_1)^2), or, where ``floor <= rtol``, 1 for s above
    rtol s_1 and 0 below.

    Args:
        rows (Tensor): Matrices with entries of at most about one. Has shape (B, M, K).
        floor (float): Noise floor, a fraction of s_1 (dimensionless).
        rtol (float): Numerical range as a fraction of s_1 (dimensionless).
        constant_root (bool): Whether the K x K matrices that multiply the rows are
            constants for the gradient.

    Returns:
        tuple[Tensor, Tensor, Tensor]: Matrices (B, M, K) and (B, K, K) whose product
        is the factor, and s_1 (B, 1, 1).
    """
    gram = _gram(rows, constant_root)
    top_squared = largest_eigenvalue(gram)
    positive = top_squared > 0
    top_squared = torch.where(positive, top_squared, 1)
    gram = gram / top_squared

    cut = floor <= rtol
    level = rtol if cut else floor
    passes = max(1, math.ceil(math.log(level) / math.log(PASS_FLOOR)))
    whole = level**2 if cut else level**2 / (1 + level**2)
    # (1 - c) G + c I, done as k passes with the k-th root of c: what is left after one
    # is of the same form in the new rows, with c divided by that root.
    part = whole ** (1 / passes)
    root = top_squared.rsqrt()
    for index in range(passes):
        if index:
            rows = rows @ root
            gram = _gram(rows, constant_root)
        shifted = (1 - part) * gram + part * _identity(gram)
        step = inverse_root(shifted, part)
        root = step if index else root * step
    if cut:
        # After all passes the square of s is s^2 / (s^2 + (1 - s^2) rtol^2).
        rows = rows @ root
        root = _root_above(_gram(rows, constant_root), 1 / (2 - level**2))
    else:
        root = root / math.sqrt(1 + level**2)
    return rows, root, torch.where(positive, top_squared, 0).sqrt()


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """Largest eigenvalue of positive semidefinite matrices, by repeated squaring.

    Args:
        gram (Tensor): Matrices. Has shape (B, K, K).

    Returns:
        Tensor: Rayleigh quotient of a vector that the 768th power has aligned, so a
        lower bound; 0 for a zero matrix. Has shape (B, 1, 1).
    """
    power = _unit_trace(gram)
    for _ in range(SQUARINGS):
        power = _unit_trace(power @ power)
    widest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
    vector = power.gather(-1, widest.expand(-1, power.shape[-1], 1))
    vector = power @ (power @ vector)
    norm = vector.square().sum(1, keepdim=True)
    quotient = (vector * (gram @ vector)).sum(1, keepdim=True)
    return quotient / torch.where(norm > 0, norm, 1)


def inverse_root(matrix: Tensor, smallest: float) -> Tensor:
    """A^(-1/2) of symmetric matrices with eigenvalues in [smallest, 1].

    Args:
        matrix (Tensor): The matrices A. Has shape (B, K, K).
        smallest (float): Lower bound of their eigenvalues, positive.

    Returns:
        Tensor: Inverse roots (B, K, K).
    """
    identity = _identity(matrix)
    root = None
    *slopes, last = step_slopes(math.sqrt(0.9 * smallest))
    for slope in slopes:
        step = 1.5 * slope * identity - 0.5 * slope**3 * matrix
        root = step if root is None else root @ step
        matrix = matrix @ step @ step
    step = 1.5 * last * identity - 0.5 * last**3 * matrix
    return step if root is None else root @ step


def step_slopes(smallest: float, tolerance: float = TOLERANCE) -> list[float]:
    """Slopes a of the cubics that bring all of [smallest, 1] to one.

    a = sqrt(3 / (1 + l + l^2)) makes the cubic least at both ends of [l, 1]; its value
    there is the next l (Chen and Chow, 2014).

    Args:
        smallest (float): Lower end of the interval, in (0, 1).
        tolerance (float): Distance from one that is reached. Defaults to 2e-6.

    Returns:
        list[float]: One slope for each step, at least one.
    """
    slopes = []
    while not slopes or 1 - smallest > tolerance:
        slope = math.sqrt(3 / (1 + smallest + smallest**2))
        smallest = 0.5 * slope * smallest * (3 - (slope * smallest) ** 2)
        slopes.append(slope)
    return slopes


def _root_above(gram: Tensor, edge: float) -> Tensor:
    """G^(-1/2) of the eigenvalues above an edge >= 1/2, and 0 of the others."""
    identity = _identity(gram)
    sign = (gram - edge * identity) / edge
    for slope in step_slopes(0.01):
        sign = 1.5 * slope * sign - 0.5 * slope**3 * sign @ sign @ sign
    projector = (identity + sign) / 2
    filled = projector @ gram @ projector + identity - projector
    return projector @ inverse_root(filled, 0.4)


def _gram(rows: Tensor, constant: bool) -> Tensor:
    rows = rows.detach() if constant else rows
    return rows.mT @ rows


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _unit_trace(matrix: Tensor) -> Tensor:
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    return matrix / torch.where(trace > 0, trace, 1)
