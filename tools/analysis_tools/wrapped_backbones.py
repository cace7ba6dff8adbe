"""What CondTok does to each stock backbone: the same when off, conditioned when on."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter

from mmengine.config import Config
from mmengine.logging import MMLogger
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from condtok_mm.analysis import WrappedReport, measure_wrapped
from condtok_mm.analysis.images import find_images
from condtok_mm.analysis.markdown import markdown_rows
from condtok_mm.analysis.wrapped_backbones import WRAPPED, load_square
from condtok_mm.engine.checked import make_run_folder

COLUMNS = (
    'backbone',
    'library',
    'conditioned behind',
    'off is stock',
    'N x D',
    'rank',
    'kappa(X)',
    'floor 0',
    'floor 0.1',
)
FILE_ONLY = ('library', 'N x D')
CAPTION = (
    'random weights, kappa 2; "off is stock": equal bit for bit; "floor 0": '
    'kappa(X + C) over the rank of X; "floor 0.1": over the directions above the floor'
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--images', nargs='+', required=True, help='photographs or folders of them'
    )
    parser.add_argument('--out-dir', default='work_dirs/wrapped_backbones')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        paths = find_images(args.images, Config())
    except FileNotFoundError as error:
        sys.exit(str(error))
    try:
        images = [load_square(path) for path in paths]
    except OSError as error:
        sys.exit(f'an image cannot be read: {error}')
    out_dir = make_run_folder(args.out_dir)
    # Each backbone that is built says so in the log.
    MMLogger.get_current_instance().setLevel(logging.WARNING)
    reports = [
        measure_wrapped(case, image, path.name)
        for case in track(WRAPPED, description='backbones')
        for path, image in zip(paths, images, strict=True)
    ]
    (out_dir / 'wrapped_backbones.json').write_text(
        json.dumps([asdict(report) for report in reports], indent=2)
    )
    pages = []
    for place, path in enumerate(paths):
        rows = [make_row(report) for report in reports[place :: len(paths)]]
        pages.append(f'{path.name}\n\n{markdown_rows(COLUMNS, rows)}')
        Console().print(make_table(rows, path.name))
    (out_dir / 'wrapped_backbones.md').write_text('\n'.join(pages))
    print(f'written: {out_dir}/wrapped_backbones.json, {out_dir}/wrapped_backbones.md')


def make_row(report: WrappedReport) -> list[str]:
    return [
        report.backbone,
        report.library,
        report.embed,
        'yes' if report.off_is_stock else 'no',
        f'{report.num_tokens} x {report.channels}',
        str(report.rank),
        f'{report.kappa_before:.3g}',
        f'{report.kappa_exact:.3f}',
        f'{report.kappa_floor:.2f}',
    ]


def make_table(rows: Sequence[Sequence[str]], title: str) -> Table:
    table = Table(
        title=title, caption=CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    shown = [place for place, name in enumerate(COLUMNS) if name not in FILE_ONLY]
    for place in shown:
        justify = 'right' if place > COLUMNS.index('off is stock') else 'left'
        table.add_column(COLUMNS[place], justify=justify, overflow='fold')
    for library, group in groupby(rows, key=itemgetter(COLUMNS.index('library'))):
        table.add_row(f'[bold]{library}')
        for row in group:
            table.add_row(*(row[place] for place in shown))
    return table


if __name__ == '__main__':
    main()
