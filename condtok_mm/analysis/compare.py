"""Variants over seeds: means, spreads and paired differences to the first variant."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass
class Summary:
    """A metric of one variant over its seeds.

    Attributes:
        count (int): Number of seeds.
        mean (float): Mean.
        std (float | None): Standard deviation, by n - 1; None for one seed.
        half_width (float | None): Half of the 95 % interval of the mean, by Student's
            t; None for one seed.
    """

    count: int
    mean: float
    std: float | None
    half_width: float | None


@dataclass
class Difference:
    """A metric of one variant minus that of the first, over the same seeds.

    Attributes:
        mean (float | None): Mean of the differences; None unless both variants have
            every seed.
        low (float | None): Lower end of its 95 % interval; None without one.
        high (float | None): Upper end.
        verdict (str): 'higher', 'lower', 'contains zero' or 'no verdict'.
        reason (str): Why there is no verdict; empty if there is one.
    """

    mean: float | None
    low: float | None
    high: float | None
    verdict: str
    reason: str = ''


@dataclass
class Comparison:
    """What is known about the variants of a study.

    Attributes:
        seeds (list[int]): Seeds that every variant should have.
        points (dict[str, dict[int, dict[str, float]]]): Values by variant, seed and
            metric.
        summaries (dict[str, dict[str, Summary]]): By variant and metric.
        differences (dict[str, dict[str, Difference]]): By variant but the first, and
            metric.
        notes (list[str]): What must be said beside the numbers.
    """

    seeds: list[int]
    points: dict[str, dict[int, dict[str, float]]]
    summaries: dict[str, dict[str, Summary]]
    differences: dict[str, dict[str, Difference]]
    notes: list[str]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that some run has."""
        return list(
            dict.fromkeys(
                name
                for runs in self.points.values()
                for values in runs.values()
                for name in values
            )
        )


def compare(
    points: dict[str, dict[int, dict[str, float]]],
    seeds: Sequence[int] = (),
    rounding: dict[str, float] | None = None,
) -> Comparison:
    """Compare variants with the first one.

    Args:
        points (dict[str, dict[int, dict[str, float]]]): Values by variant, seed and
            metric.
        seeds (Sequence[int]): Seeds that every variant should have, beside those that
            one of them has. Defaults to ().
        rounding (dict[str, float] | None): What values are rounded to, by metric.
            Defaults to None, not rounded.

    Returns:
        Comparison: The comparison.
    """
    every = sorted({*seeds, *(seed for runs in points.values() for seed in runs)})
    comparison = Comparison(every, points, {}, {}, [])
    for variant, runs in points.items():
        series = {metric: _series(runs, metric) for metric in comparison.metrics}
        comparison.summaries[variant] = {
            metric: summarise(list(values.values()))
            for metric, values in series.items()
            if values
        }
    first, *others = points
    for variant in others:
        comparison.differences[variant] = {
            metric: paired_difference(
                {name: _series(points[name], metric) for name in (first, variant)},
                every,
                (rounding or {}).get(metric, 0.0),
            )
            for metric in comparison.metrics
        }
    comparison.notes = _notes(comparison, first)
    return comparison


def _series(runs: dict[int, dict[str, float]], metric: str) -> dict[int, float]:
    return {seed: runs[seed][metric] for seed in sorted(runs) if metric in runs[seed]}


def summarise(values: Sequence[float], min_std: float = 0.0) -> Summary:
    """Sum up values.

    Args:
        values (Sequence[float]): One for each seed, at least one.
        min_std (float): Least standard deviation to believe in. Defaults to 0.0.

    Returns:
        Summary: Their summary.
    """
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Summary(count, mean, None, None)
    std = max(float(np.std(values, ddof=1)), min_std)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return Summary(count, mean, std, float(quantile * std / math.sqrt(count)))


def paired_difference(
    series: dict[str, dict[int, float]], seeds: Sequence[int], rounding: float = 0.0
) -> Difference:
    """Compare a variant with the first one, seed by seed.

    Differences of rounded values can be equal by chance, so their standard deviation is
    taken to be at least that of the rounding, rounding / sqrt(6).

    Args:
        series (dict[str, dict[int, float]]): Values by seed of the first variant and
            of the other.
        seeds (Sequence[int]): Seeds that both should have.
        rounding (float): What the values are rounded to. Defaults to 0.0.

    Returns:
        Difference: The difference.
    """
    first, other = series.values()
    missing = [
        f'{name} lacks {_count(absent)}'
        for name, values in series.items()
        if (absent := [seed for seed in seeds if seed not in values])
    ]
    if missing:
        return Difference(None, None, None, 'no verdict', ' and '.join(missing))
    differences = [other[seed] - first[seed] for seed in seeds]
    summary = summarise(differences, min_std=rounding / math.sqrt(6))
    if summary.half_width is None:
        reason = 'one seed gives no interval'
        return Difference(summary.mean, None, None, 'no verdict', reason)
    low, high = summary.mean - summary.half_width, summary.mean + summary.half_width
    if low <= 0 <= high:
        return Difference(summary.mean, low, high, 'contains zero')
    verdict = 'higher' if low > 0 else 'lower'
    return Difference(summary.mean, low, high, verdict)


def _count(seeds: Sequence[int]) -> str:
    return f'seed{"s" * (len(seeds) > 1)} {", ".join(map(str, seeds))}'


def _notes(comparison: Comparison, first: str) -> list[str]:
    notes, intervals, zeros = [], 0, 0
    for variant, differences in comparison.differences.items():
        reasons: dict[str, list[str]] = {}
        for metric, difference in differences.items():
            if difference.reason:
                reasons.setdefault(difference.reason, []).append(metric)
        for reason, metrics in reasons.items():
            every = len(metrics) == len(differences)
            what = '' if every else f' on {", ".join(metrics)}'
            notes.append(f'No verdict for {variant} against {first}{what}: {reason}.')
        decided = [d for d in differences.values() if d.low is not None]
        intervals += len(decided)
        zeros += sum(d.verdict == 'contains zero' for d in decided)
    if zeros:
        notes.append(
            f'{zeros} of {intervals} intervals contain zero: the seeds do not tell '
            'whether there is a difference there, nor that there is none.'
        )
    if intervals > 1:
        notes.append(
            f'The {intervals} intervals (variants x metrics) are not corrected for the '
            'number of comparisons; without any effect about one in 20 excludes zero.'
        )
    return notes
