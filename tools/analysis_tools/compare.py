"""Compare configs over seeds: train each with each seed, and sum up with intervals."""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from condtok_mm.analysis.compare import Comparison, Summary, compare
from condtok_mm.analysis.compare_plots import plot_curves, plot_points
from condtok_mm.analysis.markdown import markdown_table
from condtok_mm.analysis.run_logs import ROUNDING, read_run
from condtok_mm.engine.checked import make_run_folder
from condtok_mm.engine.compare_runs import (
    Run,
    Study,
    Variant,
    changes,
    load_study,
    lock,
    make_variant,
    plan_runs,
    save_study,
    train_runs,
)

VALUES_CAPTION = (
    'mean +- standard deviation (n - 1) over seeds; AP in percent, from the last '
    'validation; time: median over a run'
)
DIFFERENCES_CAPTION = (
    "mean of the differences over the same seeds, 95 % interval by Student's t; their "
    'spread is taken to be at least that of rounding AP to 0.1'
)
SHOWN_CHANGES = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'config', nargs='*', help='configs, each a variant of its own; baseline first'
    )
    parser.add_argument(
        '--variant',
        nargs='+',
        action='append',
        default=[],
        metavar=('NAME', 'CONFIG KEY=VALUE'),
        help='one more variant: its name, its config unless it is the one named last, '
        'and what it changes',
    )
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--work-dir', default='work_dirs/compare')
    parser.add_argument(
        '--jobs', type=int, default=1, help='runs at a time; they share the cores'
    )
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], help='KEY=VALUE for every variant'
    )
    parser.add_argument('--report', metavar='DIR', help='only sum up what is there')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.report:
        if args.config or args.variant:
            sys.exit('--report only sums up what is there; it takes no configs.')
        report(Path(args.report))
        return
    # So that a run does not outlive a comparison that is told to stop.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    failed = train(args)
    report(Path(args.work_dir))
    if failed:
        outputs = ', '.join(f'{run} (see {run.output})' for run in failed)
        sys.exit(f'failed: {outputs}. The same command tries again.')


def stop(*_) -> None:
    sys.exit('stopped; the same command goes on.')


def make_study(args: argparse.Namespace) -> Study:
    variants = [make_variant(Path(c).stem, c, args.cfg_options) for c in args.config]
    config = args.config[-1] if args.config else None
    for name, *words in args.variant:
        if words and '=' not in words[0]:
            config = words.pop(0)
        if config is None:
            sys.exit(f'--variant {name} has no config; name it behind the name.')
        variants.append(make_variant(name, config, [*args.cfg_options, *words]))
    names = [variant.name for variant in variants]
    if len(variants) < 2:
        sys.exit('give at least two variants: configs, or --variant.')
    if twice := {name for name in names if names.count(name) > 1}:
        sys.exit(f'two variants are named {twice.pop()}; name one by --variant.')
    if args.jobs < 1:
        sys.exit(f'--jobs must be at least 1, but got {args.jobs}.')
    return Study(variants, list(dict.fromkeys(args.seeds)))


def train(args: argparse.Namespace) -> list[Run]:
    """Train what is not finished; return the runs that failed."""
    study = make_study(args)
    folder = Path(args.work_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failed, seconds = [], []
    with lock(folder) as held:
        save_study(folder, study)
        runs = plan_runs(folder, study)
        todo = [run for run in runs if not run.is_finished()]
        ended = len(runs) - len(todo)
        columns = (
            TextColumn('{task.description}'),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn('{task.fields[left]}'),
        )
        with Progress(*columns) as progress:
            task = progress.add_task('', total=len(runs), completed=ended, left='')
            say = partial(
                progress.console.print, markup=False, highlight=False, soft_wrap=True
            )
            if ended:
                say(f'{ended} of {len(runs)} runs are finished.')

            def on_start(run: Run) -> None:
                place = f'run {runs.index(run) + 1} of {len(runs)}'
                progress.update(task, description=f'{place}: {run}')
                say(f'{place}: {run} -> {run.output}')

            def on_end(run: Run, duration: float, failure: str | None) -> None:
                progress.advance(task)
                if failure:
                    failed.append(run)
                    say(f'{run} failed: {failure}')
                    return
                seconds.append(duration)
                left = len(todo) - len(seconds) - len(failed)
                minutes = sum(seconds) / len(seconds) * left / args.jobs / 60
                text = f'about {minutes:.0f} min left'
                progress.update(task, left=text)
                say(f'{run} finished in {duration / 60:.1f} min; {text}')

            # The first run of all shows whether the configs work.
            first = todo[0] if len(todo) == len(runs) else None
            train_runs(todo, args.jobs, held, first, on_start, on_end)
    if first in failed:
        sys.exit(f'{first} failed; as it is the first, the others were not started.')
    return failed


def report(folder: Path) -> None:
    study = load_study(folder)
    logs, states = {}, []
    for run in plan_runs(folder, study):
        try:
            log = read_run(run.folder)
        except ValueError as error:
            sys.exit(f'{run}: {error}')
        logs.setdefault(run.variant.name, {})
        if log.finished:
            logs[run.variant.name][run.seed] = log
        elif run.folder.is_dir():
            states.append(f'{run} is not finished.')
    if not any(logs.values()):
        sys.exit(' '.join([f'no run in {folder} is finished.', *states]))
    points = {
        name: {seed: log.values() for seed, log in runs.items()}
        for name, runs in logs.items()
    }
    comparison = compare(points, study.seeds, ROUNDING)
    comparison.notes += states
    out_dir = make_run_folder(str(folder / 'report'))
    first, *others = study.variants
    lines = [describe(first, other) for other in others if other.settings]
    tables = [values_table(comparison), differences_table(comparison)]
    notes = '\n'.join(f'- {note}' for note in comparison.notes)
    (out_dir / 'compare.md').write_text(
        '\n\n'.join([*lines, *map(markdown_table, tables), notes]) + '\n'
    )
    variants = {
        v.name: dict(config=v.config, options=v.options) for v in study.variants
    }
    (out_dir / 'compare.json').write_text(
        json.dumps(dict(variants=variants) | asdict(comparison), indent=2)
    )
    plot_points(comparison, out_dir / 'points.png')
    plot_curves(logs, out_dir / 'curves.png')
    console = Console()
    for part in [*lines, *tables, *comparison.notes]:
        console.print(part, markup=False, highlight=False)
    print(f'written: {out_dir}/compare.json, compare.md, points.png and curves.png')


def describe(first: Variant, variant: Variant) -> str:
    """What a variant changes in the first one."""
    keys = changes(first.settings, variant.settings)
    shown = [f'{key} = {variant.settings.get(key, "absent")}' for key in keys]
    if len(keys) > SHOWN_CHANGES:
        shown[SHOWN_CHANGES:] = [f'{len(keys) - SHOWN_CHANGES} more']
    return f'{variant.name} against {first.name}: {", ".join(shown) or "no change"}'


def values_table(comparison: Comparison) -> Table:
    table = make_table('values', VALUES_CAPTION)
    table.add_column('metric', no_wrap=True)
    for variant, runs in comparison.points.items():
        table.add_column(f'{variant} (n = {len(runs)})', justify='right')
    for metric in comparison.metrics:
        cells = [
            mean_and_std(summaries[metric]) if metric in summaries else '-'
            for summaries in comparison.summaries.values()
        ]
        table.add_row(metric, *cells)
    return table


def differences_table(comparison: Comparison) -> Table:
    first = next(iter(comparison.points))
    table = make_table(f'differences to {first}', DIFFERENCES_CAPTION)
    for name in ('variant', 'metric'):
        table.add_column(name, overflow='fold')
    for name in ('difference', 'interval', 'verdict'):
        table.add_column(name, justify='right')
    for variant, differences in comparison.differences.items():
        for metric, it in differences.items():
            mean = '-' if it.mean is None else f'{it.mean:+.3g}'
            interval = '-' if it.low is None else f'{it.low:+.3g} to {it.high:+.3g}'
            table.add_row(variant, metric, mean, interval, it.verdict)
    return table


def make_table(title: str, caption: str) -> Table:
    return Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def mean_and_std(summary: Summary) -> str:
    if summary.std is None:
        return number(summary.mean)
    return f'{number(summary.mean)} +- {number(summary.std)}'


def number(value: float) -> str:
    return f'{value:.1f}' if abs(value) >= 10 else f'{value:.2g}'


if __name__ == '__main__':
    main()
