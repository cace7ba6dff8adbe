"""Tell what is installed here, what of it runs, and which command mends the rest.

It works where the stack does not: what may fail is tried in a second process. The
output can be pasted into a bug report. Exits with 1 if training or testing would fail.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
# Importing the package raises where the stack is broken; these files of it need none.
sys.modules['condtok_mm'] = module_from_spec(find_spec('condtok_mm'))

from condtok_mm.environment.facts import collect, table  # noqa: E402
from condtok_mm.environment.findings import find  # noqa: E402

WIDTH = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('checkpoint', nargs='*', help='files to try to read')
    args = parser.parse_args()
    print('trying what is installed (up to a minute) ...', file=sys.stderr)
    facts = collect(args.checkpoint)
    show(list(table(facts)))
    found = find(facts)
    for finding in found:
        print(f'{"ERROR" if finding.error else "warning"}: {finding.sentence}')
        if finding.command:
            print(f'    {finding.command}')
    errors = sum(finding.error for finding in found)
    print(f'errors: {errors}, warnings: {len(found) - errors}')
    sys.exit(errors > 0)


def show(rows: Sequence[tuple[str, str]]) -> None:
    try:
        from rich import box  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        print(*(f'{name:<18} {value}' for name, value in rows), sep='\n')
        return
    grid = Table('what', 'found', box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        grid.add_row(*row)
    Console(
        width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False
    ).print(grid)


if __name__ == '__main__':
    main()
