"""What ConditionNumberHook has logged, read and drawn."""

from collections.abc import Mapping
from pathlib import Path

from .scalars import NotALogError, read_records

KAPPAS = ('token_kappa', 'token_kappa_conditioned')
PANELS = {
    'token_kappa': 'condition number of X',
    'token_kappa_conditioned': 'condition number of X + C',
    'token_rank': 'numerical rank of X',
    'token_norm_growth': 'norm of X + C over that of X',
}
"""Scalars that are drawn, and what they are."""

Curve = dict[int, float]


def read_conditioning(run: str | Path) -> dict[str, Curve]:
    """Read the scalars of a run.

    A run that was resumed has one log for each start. They are joined: from its first
    iteration on, a log replaces what earlier ones say. So a run that began anew in the
    same folder replaces the earlier one.

    Args:
        run (str | Path): Work dir of the run, one of its time-stamped folders, or a
            log, as ``vis_data/scalars.json``.

    Returns:
        dict[str, Curve]: For each scalar of :data:`PANELS` that was logged, its value
        at each iteration, in order.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If a log cannot be read or holds no such scalar.
    """
    lines: dict[int, dict] = {}
    for log in _find_logs(Path(run)):
        new = _read_log(log)
        begin = min(new, default=float('inf'))
        lines = {i: line for i, line in lines.items() if i < begin} | new
    curves = {
        name: {i: line[name] for i, line in sorted(lines.items()) if name in line}
        for name in PANELS
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        raise ValueError(
            f'{run} holds no condition numbers; train with '
            "custom_hooks = [dict(type='ConditionNumberHook')] to log them."
        )
    return curves


def plot_conditioning(runs: Mapping[str, dict[str, Curve]], path: str | Path) -> None:
    """Plot the scalars of runs over the iterations.

    Args:
        runs (Mapping[str, dict[str, Curve]]): What :func:`read_conditioning` returned
            for each run, by what to call it.
        path (str | Path): Where to write the picture.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = [n for n in PANELS if any(n in curves for curves in runs.values())]
    rows = len(names) // 2
    figure = Figure(figsize=(10, 3.5 * rows), layout='constrained')
    colors = {label: f'C{index % 10}' for index, label in enumerate(runs)}
    lines = {}
    for axes, name in zip(figure.subplots(rows, 2).flat, names, strict=True):
        for label, curves in runs.items():
            if curve := curves.get(name):
                (lines[label],) = axes.plot(
                    list(curve), list(curve.values()), '.-', color=colors[label]
                )
        axes.set(xlabel='iteration', ylabel=PANELS[name])
        if name in KAPPAS:
            axes.set_yscale('log')
        axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc='outside lower center')
    figure.savefig(path, dpi=120)


def _find_logs(run: Path) -> list[Path]:
    """Logs of a run, the earliest first: their folders are named by the time."""
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise FileNotFoundError(f'{run} does not exist; give the work dir of a run.')
    name = 'vis_data/scalars.json'
    logs = sorted(run.glob(f'*/{name}')) or sorted(run.glob(name))
    if not logs:
        raise FileNotFoundError(
            f'{run} holds no */{name}; give the work dir of a run that has trained.'
        )
    return logs


def _read_log(log: Path) -> dict[int, dict]:
    """Training lines of a log by iteration, without the prefix of a hierarchy."""
    lines = {}
    try:
        for record in read_records(log):
            line = {k.removeprefix('train/'): v for k, v in record.items()}
            if 'iter' in line and 'loss' in line:
                lines[line['iter']] = line
    except NotALogError as error:
        raise ValueError(
            f'line {error.number} of {log} is not one of a training log; give a work '
            'dir or a scalars.json.'
        ) from None
    return lines
