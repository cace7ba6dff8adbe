"""Condition number of embedded tokens, before and after the correction."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..conditioning.attach import conditioned_layer
from ..conditioning.spectrum import (
    condition_over,
    default_rtol,
    numerical_rank,
    singular_values,
)


@dataclass
class TokenReport:
    """Tokens of one image.

    Attributes:
        name (str): The image.
        num_tokens (int): Tokens N that hold image.
        channels (int): Channels D.
        rank (int): Numerical rank r of X.
        kappa_before (float): s_1 / s_r of X (dimensionless).
        kappa_after (float): s_1 / s_r of X + C, with the r of X (dimensionless).
        kappa_above_floor (float): The same over the directions of X of at least
            floor * s_1 (dimensionless).
        growth (float): Frobenius norm of X + C over that of X (dimensionless).
        values_before (list[float]): Singular values of X, descending.
        values_after (list[float]): Singular values of X + C, descending.
    """

    name: str
    num_tokens: int
    channels: int
    rank: int
    kappa_before: float
    kappa_after: float
    kappa_above_floor: float
    growth: float
    values_before: list[float] = field(repr=False)
    values_after: list[float] = field(repr=False)


@torch.no_grad()
def measure_tokens(backbone: nn.Module, image: Tensor, name: str = '') -> TokenReport:
    """Measure the embedded tokens of one image in a conditioned backbone.

    Args:
        backbone (nn.Module): A backbone with a conditioner.
        image (Tensor): Normalised image. Has shape (1, C, H, W).
        name (str): What to call it. Defaults to ''.

    Returns:
        TokenReport: The report.

    Raises:
        ValueError: If the backbone has no conditioner, or the image no token.
    """
    forward = conditioned_layer(backbone).forward
    conditioner = forward.conditioner
    before, valid = forward.tokens(image, forward.embed(image))
    after = conditioner(before, valid)
    rtol = default_rtol(before.dtype) if conditioner.rtol is None else conditioner.rtol
    values_before = singular_values(before, valid, rtol)
    values_after = singular_values(after, valid, rtol)
    try:
        change = compare_spectra(values_before, values_after, conditioner.floor, rtol)
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from None
    return TokenReport(
        name=name,
        num_tokens=before.shape[1] if valid is None else int(valid.sum()),
        channels=before.shape[2],
        rank=change.rank,
        kappa_before=change.kappa_before,
        kappa_after=change.kappa_after,
        kappa_above_floor=change.kappa_above_floor,
        growth=change.growth,
        values_before=values_before[0].tolist(),
        values_after=values_after[0].tolist(),
    )


@dataclass
class SpectralChange:
    """What a correction makes of the singular values of one token matrix.

    Attributes:
        rank (int): Numerical rank r of X.
        directions (int): Directions of X of at least floor * s_1, within its rank.
        kappa_before (float): s_1 / s_r of X (dimensionless).
        kappa_after (float): The same of X + C, with the r of X (dimensionless).
        kappa_above_floor (float): The same over ``directions`` (dimensionless).
        growth (float): Frobenius norm of X + C over that of X (dimensionless).
    """

    rank: int
    directions: int
    kappa_before: float
    kappa_after: float
    kappa_above_floor: float
    growth: float


def compare_spectra(
    before: Tensor, after: Tensor, floor: float, rtol: float
) -> SpectralChange:
    """Compare the singular values of X and X + C.

    Args:
        before (Tensor): Those of X, descending. Has shape (1, K).
        after (Tensor): Those of X + C, descending. Has shape (1, K).
        floor (float): Noise floor, a fraction of s_1 (dimensionless).
        rtol (float): Numerical range as a fraction of s_1 (dimensionless).

    Returns:
        SpectralChange: The comparison.

    Raises:
        ValueError: If X has rank 0.
    """
    rank = numerical_rank(before, rtol)
    if rank.item() == 0:
        raise ValueError('the image holds nothing but padding, inf or nan.')
    directions = torch.minimum((before >= floor * before[:, :1]).sum(-1), rank)
    return SpectralChange(
        rank=rank.item(),
        directions=directions.item(),
        kappa_before=condition_over(before, rank).item(),
        kappa_after=condition_over(after, rank).item(),
        kappa_above_floor=condition_over(after, directions).item(),
        growth=(after.norm() / before.norm()).item(),
    )


def plot_tokens(reports: Sequence[TokenReport], path: str | Path) -> None:
    """Plot the singular values of all reports, relative to the largest.

    Args:
        reports (Sequence[TokenReport]): What to plot.
        path (str | Path): Where to write the picture.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4.5), layout='constrained')
    axes = figure.subplots()
    for index, report in enumerate(reports):
        for values, color, label in (
            (report.values_before, 'tab:gray', 'X, as embedded'),
            (report.values_after, 'tab:blue', 'X + C, conditioned'),
        ):
            relative = [max(value / values[0], 1e-12) for value in values]
            axes.semilogy(
                range(1, len(values) + 1),
                relative,
                color=color,
                alpha=0.6,
                label=label if index == 0 else None,
            )
    axes.axvline(reports[0].rank, color='black', linestyle=':', linewidth=1)
    axes.annotate(
        f'rank {reports[0].rank}',
        (reports[0].rank, 1),
        xytext=(-4, -4),
        textcoords='offset points',
        ha='right',
        va='top',
    )
    axes.set(
        xlabel='direction',
        ylabel='singular value / largest',
        title=f'Embedded tokens of {len(reports)} images',
    )
    axes.legend(loc='lower left')
    figure.savefig(path, dpi=120)
