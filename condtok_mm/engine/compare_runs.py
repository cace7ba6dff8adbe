"""Train the variants of a study over seeds, each run in a process of its own."""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from mmengine.config import DictAction

from .. import CONFIGS
from ..analysis.run_logs import read_run
from .checked import load_config
from .resuming import numbered_checkpoints

TRAIN = Path(CONFIGS).parent / 'tools' / 'train.py'
POLL_SECONDS = 0.2
LOG_LINES = 15


@dataclass
class Variant:
    """One side of a comparison.

    Attributes:
        name (str): What to call it, and its folder.
        config (str): Config file.
        options (list[str]): ``KEY=VALUE`` words that change the config.
        settings (dict[str, str]): The config as it is run, by dotted key.
    """

    name: str
    config: str
    options: list[str]
    settings: dict[str, str] = field(repr=False)


@dataclass
class Study:
    """Variants over seeds, in a folder.

    Attributes:
        variants (list[Variant]): Variants; the others are compared with the first.
        seeds (list[int]): Seeds of each of them.
    """

    variants: list[Variant]
    seeds: list[int]


@dataclass
class Run:
    """One variant with one seed.

    Attributes:
        variant (Variant): The variant.
        seed (int): The seed.
        folder (Path): Its work directory.
    """

    variant: Variant
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f'{self.variant.name}, seed {self.seed}'

    @property
    def output(self) -> Path:
        """File with what the process printed, of all its starts."""
        return self.folder / 'train.log'

    def is_finished(self) -> bool:
        """Whether its last validation is logged and its last checkpoint exists."""
        log = read_run(self.folder)
        return log.finished and (self.folder / f'{log.end}.pth').is_file()

    def command(self) -> list[str]:
        """Command that starts it, or goes on where it was interrupted."""
        checkpoint = checkpoint_to_resume(self.folder)
        resume = ['--resume', str(checkpoint)] if checkpoint else ['--overwrite']
        return [
            sys.executable,
            str(TRAIN),
            self.variant.config,
            '--work-dir',
            str(self.folder),
            *resume,
            '--cfg-options',
            *self.variant.options,
            f'randomness.seed={self.seed}',
        ]


def make_variant(name: str, config: str, options: list[str]) -> Variant:
    """Make a variant, and read its config.

    Args:
        name (str): What to call it.
        config (str): Config file.
        options (list[str]): ``KEY=VALUE`` words that change the config.

    Returns:
        Variant: The variant.

    Raises:
        SystemExit: If the name cannot be a folder, a word is none or the config cannot
            be used.
    """
    if not re.fullmatch(r'\w[\w.=+-]*', name):
        sys.exit(
            f'{name!r} cannot name a variant: letters, digits and _ . = + - can, and '
            'it becomes the name of a folder.'
        )
    if wrong := [word for word in options if '=' not in word]:
        sys.exit(f'{name}: {wrong[0]!r} is not of the form KEY=VALUE.')
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='*', action=DictAction)
    parsed = parser.parse_args(['--cfg-options', *options]).cfg_options
    cfg = load_config(config, parsed)
    return Variant(name, config, options, dict(_flat(cfg.to_dict())))


def _flat(value, key: str = '') -> Iterator[tuple[str, str]]:
    """Leaves of nested containers by dotted key."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and value:
        items = enumerate(value)
    else:
        yield key, repr(value)
        return
    for name, child in items:
        yield from _flat(child, f'{key}.{name}' if key else str(name))


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Keys that differ between the settings of two variants.

    Args:
        before (dict[str, str]): Settings.
        after (dict[str, str]): Settings.

    Returns:
        list[str]: Dotted keys, sorted.
    """
    keys = before.keys() | after.keys()
    changed = [key for key in sorted(keys) if before.get(key) != after.get(key)]
    # A key whose value was replaced by a container is told by what is in that.
    return [
        key
        for key in changed
        if not any(other.startswith(f'{key}.') for other in changed)
    ]


def load_study(folder: str | Path) -> Study:
    """Read what a folder compares.

    Args:
        folder (str | Path): Folder of a study.

    Returns:
        Study: The study; without a ``study.json`` the folders VARIANT/seed_SEED tell,
        in alphabetical order.

    Raises:
        SystemExit: If there is no run in it.
    """
    path = Path(folder) / 'study.json'
    if path.is_file():
        content = json.loads(path.read_text())
        variants = [Variant(**variant) for variant in content['variants']]
        return Study(variants, content['seeds'])
    found = [
        (run.parent.name, int(run.name[len('seed_') :]))
        for run in Path(folder).glob('*/seed_*')
        if run.name[len('seed_') :].isdecimal()
    ]
    if not found:
        sys.exit(f'{folder} has neither a study.json nor folders VARIANT/seed_SEED.')
    names = sorted({name for name, _ in found})
    variants = [Variant(name, '', [], {}) for name in names]
    return Study(variants, sorted({seed for _, seed in found}))


def save_study(folder: Path, study: Study) -> None:
    """Write down what a folder compares, together with what it compared before.

    Args:
        folder (Path): Folder of the study.
        study (Study): The study. Variants and seeds of earlier calls are kept in the
            file.

    Raises:
        SystemExit: If a variant was run with other settings before.
    """
    path, variants = folder / 'study.json', {v.name: v for v in study.variants}
    seeds = set(study.seeds)
    earlier = load_study(folder) if path.is_file() else Study([], [])
    for old in earlier.variants:
        new = variants.setdefault(old.name, old)
        if keys := changes(old.settings, new.settings):
            key = keys[0]
            sys.exit(
                f'{folder} holds runs of {old.name} with other settings: {key} was '
                f'{old.settings.get(key, "absent")} and is '
                f'{new.settings.get(key, "absent")} now, one of {len(keys)} that '
                'differ. Name the variant otherwise, or give another --work-dir.'
            )
    merged = Study(list(variants.values()), sorted(seeds | set(earlier.seeds)))
    path.write_text(json.dumps(asdict(merged), indent=1))


def plan_runs(folder: Path, study: Study) -> list[Run]:
    """List the runs of a study, all variants of a seed before the next seed.

    Args:
        folder (Path): Folder of the study.
        study (Study): The study.

    Returns:
        list[Run]: The runs.
    """
    return [
        Run(variant, seed, folder / variant.name / f'seed_{seed}')
        for seed in study.seeds
        for variant in study.variants
    ]


def checkpoint_to_resume(folder: Path) -> Path | None:
    """Find the checkpoint to go on from.

    It is the last one that was completed; the one before it if that is the last of the
    training, since from there nothing would be validated any more.

    Args:
        folder (Path): Work directory of a run.

    Returns:
        Path | None: The file; None if the run must begin anew.
    """
    marker = folder / 'last_checkpoint'
    if not marker.is_file():
        return None
    end = read_run(folder).end
    found = numbered_checkpoints(folder, Path(marker.read_text().strip()).stem)
    return next((path for path in found if path.stem != end), None)


@contextmanager
def lock(folder: Path) -> Iterator[int]:
    """Keep a second study out of a folder, for as long as a run of it is alive.

    Args:
        folder (Path): Folder of the study.

    Yields:
        int: File descriptor that each run must inherit.

    Raises:
        SystemExit: If the folder is in use.
    """
    with (folder / 'study.lock').open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f'{folder} is in use: another comparison, or a run that one left '
                'behind, is alive. Wait for it or stop it.'
            )
        yield file.fileno()


def train_runs(
    runs: list[Run],
    jobs: int,
    held: int,
    stop_at: Run | None,
    on_start: Callable[[Run], None],
    on_end: Callable[[Run, float, str | None], None],
) -> None:
    """Train in turn, and leave no process behind.

    SIGTERM and SIGINT are handled when the runs that are alive have ended.

    Args:
        runs (list[Run]): What to train.
        jobs (int): Runs at a time; the cores are shared out between them unless
            ``OMP_NUM_THREADS`` is set.
        held (int): What :func:`lock` yields.
        stop_at (Run | None): Run whose failure ends the others too.
        on_start (Callable): Called with each run that starts.
        on_end (Callable): Called with each run that ends, its seconds and, if it
            failed, why.
    """
    waiting, alive = list(reversed(runs)), {}
    threads = str(max(1, torch.get_num_threads() // jobs))
    environment = dict(OMP_NUM_THREADS=threads) | os.environ
    with _noted_signals() as noted:
        try:
            while (waiting or alive) and not noted:
                while waiting and len(alive) < jobs and not noted:
                    run = waiting.pop()
                    process = _start(run, held, environment)
                    alive[process] = (run, time.monotonic())
                    on_start(run)
                time.sleep(POLL_SECONDS)
                for process in [p for p in alive if p.poll() is not None]:
                    run, start = alive.pop(process)
                    failure = _failure(run, process.returncode)
                    on_end(run, time.monotonic() - start, failure)
                    if failure and run is stop_at:
                        return
        finally:
            for process in alive:
                process.terminate()
            for process in alive:
                process.wait()


def _start(run: Run, held: int, environment: dict[str, str]) -> subprocess.Popen:
    run.folder.mkdir(parents=True, exist_ok=True)
    with run.output.open('a') as output:
        return subprocess.Popen(
            run.command(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(held,),
        )


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Note what would stop this process.

    An exception that a handler raises while a run is being started would lose that run,
    so the first signal is raised again at the end.
    """
    noted = []
    before = {
        number: signal.signal(number, lambda number, _: noted.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in noted[:1]:
        signal.raise_signal(number)


def _failure(run: Run, status: int) -> str | None:
    """Why a run that ended is not finished."""
    if status:
        return f'it ended with status {status}:\n{_end_of(run.output)}'
    if run.is_finished():
        return None
    return (
        'it ended without a last validation and checkpoint in its folder (see '
        f'train_cfg and default_hooks.checkpoint):\n{_end_of(run.output)}'
    )


def _end_of(path: Path) -> str:
    lines = path.read_text(errors='replace').splitlines()
    return '\n'.join(lines[-LOG_LINES:])
