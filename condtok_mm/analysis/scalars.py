"""The logs that mmengine writes, ``vis_data/scalars.json``."""

import json
from collections.abc import Iterator
from pathlib import Path


class NotALogError(ValueError):
    """A line is not one of a log.

    Attributes:
        path (Path): The file.
        number (int): The line, from 1.
    """

    def __init__(self, path: Path, number: int, reason: Exception | str) -> None:
        super().__init__(f'{path}, line {number}: {reason}')
        self.path = path
        self.number = number


def read_records(path: Path) -> Iterator[dict]:
    """Read a log.

    Args:
        path (Path): The file.

    Yields:
        dict: Its records. Half a line at the end, which a run that is killed can leave,
        is left out.

    Raises:
        NotALogError: If another line is no record.
    """
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise NotALogError(path, number, error) from error
        if not isinstance(record, dict):
            raise NotALogError(path, number, f'{record!r} is no record')
        yield record
