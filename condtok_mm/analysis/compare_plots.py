"""Pictures of a comparison: points with means and intervals, and curves."""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .compare import Comparison
from .run_logs import RunLog

CURVES = ('loss', 'box AP', 'mask AP')


def plot_points(comparison: Comparison, path: str | Path) -> None:
    """Plot each metric: values on the left, differences to the first on the right.

    Each seed is a small point, joined to the same seed of the other variants; the mean
    and its 95 % interval are beside it.

    Args:
        comparison (Comparison): What to plot.
        path (str | Path): Where to write the picture.
    """
    metrics, variants = comparison.metrics, list(comparison.points)
    first = variants[0]
    figure = Figure(
        figsize=(11, len(metrics) * (0.7 + 0.3 * len(variants))), layout='constrained'
    )
    grid = figure.subplots(len(metrics), 2, sharey=True, squeeze=False)
    for metric, (left, right) in zip(metrics, grid, strict=True):
        for place, variant in enumerate(variants):
            runs, color = comparison.points[variant], _color(place)
            seeds = [seed for seed in runs if metric in runs[seed]]
            values = [runs[seed][metric] for seed in seeds]
            left.plot(values, [place] * len(values), '.', color=color, alpha=0.6)
            if summary := comparison.summaries[variant].get(metric):
                _interval(left, place, summary.mean, summary.half_width, color)
            base = comparison.points[first]
            pairs = [
                runs[seed][metric] - base[seed][metric]
                for seed in seeds
                if metric in base.get(seed, {})
            ]
            difference = comparison.differences.get(variant, {}).get(metric)
            if difference:
                right.plot(pairs, [place] * len(pairs), '.', color=color, alpha=0.6)
            if difference and difference.low is not None:
                half = (difference.high - difference.low) / 2
                _interval(right, place, difference.mean, half, color)
        for seed in comparison.seeds:
            joined = [comparison.points[v].get(seed, {}).get(metric) for v in variants]
            line = np.array(joined, dtype=float)
            left.plot(line, range(len(line)), color='tab:gray', alpha=0.3, linewidth=1)
        right.axvline(0, color='black', linewidth=1)
        left.set(xlabel=metric, yticks=range(len(variants)), yticklabels=variants)
        right.set_xlabel(f'{metric}, difference')
        left.margins(y=0.25)
    # All axes share it.
    grid[0, 0].invert_yaxis()
    figure.savefig(path, dpi=100)


def _interval(
    axes: Axes, place: int, mean: float, half_width: float | None, color
) -> None:
    style = dict(fmt='D', markersize=4, capsize=3, color=color)
    axes.errorbar(mean, place + 0.2, xerr=half_width, **style)


def plot_curves(logs: dict[str, dict[int, RunLog]], path: str | Path) -> None:
    """Plot loss and validations against the iteration, a line for each seed.

    Args:
        logs (dict[str, dict[int, RunLog]]): Logs by variant and seed.
        path (str | Path): Where to write the picture.
    """
    figure = Figure(figsize=(14, 4.5), layout='constrained')
    for axes, name in zip(figure.subplots(1, len(CURVES)), CURVES, strict=True):
        for place, (variant, runs) in enumerate(logs.items()):
            for turn, log in enumerate(runs.values()):
                points = log.losses if name == 'loss' else log.curve(name)
                axes.plot(
                    list(points),
                    list(points.values()),
                    marker='' if name == 'loss' else '.',
                    color=_color(place),
                    alpha=0.6,
                    label=None if turn else variant,
                )
        axes.set(xlabel='iteration', ylabel=name)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def _color(place: int):
    return colormaps['tab10'](place % 10)
