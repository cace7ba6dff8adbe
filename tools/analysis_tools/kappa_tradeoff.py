"""What each kappa and floor gains, in condition number, and costs, in sensitivity.

The tokens of some images are conditioned with each pair of --kappa and --floor, and so
are those of the same images with one grey level of noise, compressed as JPEG, resized
and back, and in a larger batch.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import cv2
import torch
from mmdet.utils import register_all_modules
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from condtok_mm.analysis.images import image_pipeline
from condtok_mm.analysis.kappa_tradeoff import (
    JPEG_QUALITY,
    RESIZE,
    Tradeoff,
    average,
    embed_disturbed,
    measure_setting,
    plot_tradeoff,
)
from condtok_mm.analysis.markdown import markdown_rows
from condtok_mm.conditioning import TokenConditioner
from condtok_mm.engine.checked import (
    load_conditioned,
    load_config,
    make_run_folder,
    measuring_parser,
    select_images,
)

COLUMNS = (
    'kappa,\nfloor',
    'above\nfloor',
    'kappa\nof these',
    'kappa\nof all',
    'norm\ngrows',
)
SENSITIVITIES = dict(
    noise='noise\n%', jpeg='JPEG\n%', resize='resize\n%', padding='batch\n%'
)
CAPTION = (
    'kappa of X + C, over the directions of X above the noise floor and over its rank; '
    'change of the tokens by Gaussian noise of one grey level, rounded to 8 bits, by '
    f'JPEG of quality {JPEG_QUALITY}, by resizing to {RESIZE:.0%} and back, and by '
    'padding in a larger batch'
)


def parse_args() -> argparse.Namespace:
    parser = measuring_parser(__doc__, 'kappa_tradeoff')
    parser.add_argument('--kappa', type=float, nargs='+', default=[2, 5, 21])
    parser.add_argument('--floor', type=float, nargs='+', default=[0, 0.03, 0.1, 0.3])
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    try:
        conditioners = [
            TokenConditioner(kappa, floor=floor)
            for kappa, floor in product(args.kappa, args.floor)
        ]
    except ValueError as error:
        sys.exit(str(error))
    paths = select_images(args, cfg)
    torch.manual_seed(0)
    model = load_conditioned(args, cfg)
    out_dir = make_run_folder(args.out_dir)
    reports = measure(model, image_pipeline(cfg), paths, [None, *conditioners])
    if not reports:
        sys.exit('no image could be measured.')
    points = [average(images) for images in zip(*reports.values(), strict=True)]
    names = [Path(path).name for path in reports]
    what = names[0] if len(names) == 1 else f'{len(names)} images'
    title = f'{Path(args.config).stem}: {what}'
    result = dict(
        mean=[asdict(point) for point in points],
        images={path: [asdict(r) for r in image] for path, image in reports.items()},
    )
    (out_dir / 'kappa_tradeoff.json').write_text(json.dumps(result, indent=2))
    rows = [make_row(point) for point in points]
    columns = [*COLUMNS, *(SENSITIVITIES[name] for name in points[0].sensitivity)]
    page = f'{title}\n\n{markdown_rows(columns, rows)}\n{CAPTION}\n'
    (out_dir / 'kappa_tradeoff.md').write_text(page)
    plot_tradeoff(points, title, out_dir / 'kappa_tradeoff.png')
    Console().print(make_table(columns, rows, title))
    print(f'written: {out_dir}/kappa_tradeoff.json, .md and .png')


def measure(model, pipeline, paths, conditioners) -> dict[str, list[Tradeoff]]:
    reports = {}
    with Progress() as progress:
        task = progress.add_task('settings', total=len(paths) * len(conditioners))
        for done, path in enumerate(paths):
            completed = done * len(conditioners)
            progress.update(task, description=path.name, completed=completed)
            try:
                embedded = embed_disturbed(model, pipeline, path)
                reports[str(path)] = [
                    measure_setting(embedded, conditioner)
                    for conditioner in progress.track(conditioners, task_id=task)
                ]
            except (AssertionError, OSError, cv2.error) as error:
                print(f'left out: {path} cannot be read ({error}).', file=sys.stderr)
            except ValueError as error:
                print(f'left out: {path}: {error}', file=sys.stderr)
    return reports


def make_row(point: Tradeoff) -> list[str]:
    embedded = point.kappa is None
    return [
        'X itself' if embedded else f'{point.kappa:g}, {point.floor:g}',
        f'{point.directions:.0f}',
        f'{point.kappa_above_floor:.3g}',
        f'{point.kappa_reached:.3g}',
        f'{point.growth:.2f}',
        *(f'{100 * change:.1f}' for change in point.sensitivity.values()),
    ]


def make_table(columns, rows, title: str) -> Table:
    table = Table(
        title=title, caption=CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in columns:
        justify = 'left' if name == columns[0] else 'right'
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == '__main__':
    main()
