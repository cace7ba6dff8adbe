"""Where to go on with a run that was killed."""

import re
import sys
import zipfile
from pathlib import Path

NUMBERED = re.compile(r'(epoch|iter)_(\d+)')


def replacement_checkpoint(folder: Path) -> Path | None:
    """Find what to resume from, where mmengine would take a file that is not whole.

    mmengine writes a checkpoint in place, and resumes from the one that
    ``last_checkpoint`` names. A run that is killed while it writes that file anew, as
    for the best model, leaves a part of it; a computer that fails leaves anything.

    Args:
        folder (Path): Work directory of a run.

    Returns:
        Path | None: The last whole checkpoint before the one that is named; None if
        mmengine's own choice is right.

    Raises:
        SystemExit: If none is whole.
    """
    marker = folder / 'last_checkpoint'
    if not marker.is_file():
        return None
    named = marker.read_text().strip()
    if '://' in named or is_whole(Path(named)):
        return None
    what = f'{marker} names {named or "nothing"}, which is not a whole checkpoint'
    found = numbered_checkpoints(folder, Path(named).stem)
    if path := next(filter(is_whole, found), None):
        print(f'{what}; going on from {path}.')
        return path
    sys.exit(
        f'{what}, and there is no other before it. Begin anew by --overwrite instead '
        'of --resume.'
    )


def is_whole(path: Path) -> bool:
    """Tell whether a checkpoint was written to its end.

    Args:
        path (Path): A file that ``torch.save`` wrote, or a part of one.

    Returns:
        bool: Whether its directory, which comes last, is there.
    """
    return path.is_file() and zipfile.is_zipfile(path)


def numbered_checkpoints(folder: Path, last: str) -> list[Path]:
    """List the checkpoints of a run that can be gone on from.

    Args:
        folder (Path): Work directory of the run.
        last (str): Name of the last one to list, without its suffix, as
            ``last_checkpoint`` tells it; all are listed if it has no number.

    Returns:
        list[Path]: Those up to it and of its kind, by epoch or by iteration, from the
        newest on.
    """
    limit, found = NUMBERED.fullmatch(last), []
    for path in folder.glob('*.pth'):
        match = NUMBERED.fullmatch(path.stem)
        if not match or (limit and match[1] != limit[1]):
            continue
        number = int(match[2])
        if limit is None or number <= int(limit[2]):
            found.append((number, path))
    return [path for _, path in sorted(found, reverse=True)]
