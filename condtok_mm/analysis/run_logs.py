"""What a training run left in its work directory, through all its interruptions."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config

from .scalars import read_records

APS = {
    f'coco/{key}_mAP{suffix}': f'{kind} AP{short}'
    for key, kind in (('bbox', 'box'), ('segm', 'mask'))
    for suffix, short in (
        ('', ''),
        ('_50', '50'),
        ('_75', '75'),
        ('_s', ' small'),
        ('_m', ' medium'),
        ('_l', ' large'),
    )
}
"""Name of each average precision by its key in a log."""
ROUNDING = dict.fromkeys(APS.values(), 0.1)
"""What mmdet rounds them to, in percent."""
TIME = 's / iteration'
MEMORY = 'MiB'


@dataclass
class RunLog:
    """Records of a run; what a resumed run repeated replaces what it repeats.

    Attributes:
        losses (dict[int, float]): Loss by iteration.
        validations (dict[int, dict[str, float]]): Average precisions in percent, by
            the last iteration that was logged before them.
        end (str | None): Name of the checkpoint at the end of the training, without
            its suffix; None where no config was found.
        finished (bool): Whether the last record is that of the validation at the end.
        seconds (float | None): Median time of an iteration, where logged.
        memory (float | None): Largest memory in MiB, where logged.
    """

    losses: dict[int, float]
    validations: dict[int, dict[str, float]]
    end: str | None
    finished: bool
    seconds: float | None
    memory: float | None

    def values(self) -> dict[str, float]:
        """Values of a finished run: of its last validation, time and memory."""
        costs = {TIME: self.seconds, MEMORY: self.memory}
        values = dict(self.validations[max(self.validations)])
        return values | {k: value for k, value in costs.items() if value is not None}

    def curve(self, name: str) -> dict[int, float]:
        """Validated values of one average precision by iteration."""
        return {i: aps[name] for i, aps in self.validations.items() if name in aps}


def read_run(folder: str | Path) -> RunLog:
    """Read the logs of a run.

    Args:
        folder (str | Path): Its work directory.

    Returns:
        RunLog: What is in them.

    Raises:
        ValueError: If one of them is not a log.
    """
    training, validations, iteration, validated = {}, {}, 0, False
    for record in _records(Path(folder)):
        if 'loss' in record:
            iteration, validated = record['iter'], False
            training[iteration] = record
        elif aps := _average_precisions(record):
            validations[iteration], validated = aps, True
    times = [record['time'] for record in training.values() if 'time' in record]
    memories = [record['memory'] for record in training.values() if 'memory' in record]
    end, reached = _end(Path(folder), training.get(iteration, {}))
    return RunLog(
        losses={i: record['loss'] for i, record in sorted(training.items())},
        validations=dict(sorted(validations.items())),
        end=end,
        finished=validated and reached,
        seconds=statistics.median(times) if times else None,
        memory=max(memories) if memories else None,
    )


def _records(folder: Path) -> Iterator[dict]:
    for path in sorted(folder.glob('[0-9]*_[0-9]*/vis_data/scalars.json')):
        yield from read_records(path)


def _average_precisions(record: dict) -> dict[str, float]:
    """In percent; -1 means that the data set has no object of a size."""
    return {
        name: 100 * record[key] for key, name in APS.items() if record.get(key, -1) >= 0
    }


def _end(folder: Path, last: dict) -> tuple[str | None, bool]:
    """Name of the last checkpoint, and whether the last training record is at it."""
    configs = sorted(folder.glob('[0-9]*_[0-9]*/vis_data/config.py'))
    if not configs:
        return None, True
    cfg = Config.fromfile(configs[-1], import_custom_modules=False)
    if 'max_epochs' in cfg.train_cfg:
        epochs = cfg.train_cfg.max_epochs
        return f'epoch_{epochs}', last.get('epoch') == epochs
    iterations = cfg.train_cfg.max_iters
    left = iterations - last.get('iter', 0)
    return f'iter_{iterations}', left < cfg.default_hooks.logger.get('interval', 10)
