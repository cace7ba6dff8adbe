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
    if path := _newest_whole(folder, Path(named).stem):
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


def _newest_whole(folder: Path, last: str) -> Path | None:
    """Of the checkpoints up to the one with a name, or of all if it tells nothing."""
    limit, found = NUMBERED.fullmatch(last), []
    for path in folder.glob('*.pth'):
        match = NUMBERED.fullmatch(path.stem)
        if not match or not is_whole(path):
            continue
        number = int(match[2])
        if limit is None or (match[1] == limit[1] and number <= int(limit[2])):
            found.append((number, path))
    return max(found, default=(0, None))[1]
