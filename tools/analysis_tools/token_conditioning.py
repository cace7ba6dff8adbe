"""Condition number of a model's embedded tokens, before and after the correction."""

import json
import sys
from dataclasses import asdict

import cv2
from mmdet.utils import register_all_modules
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from condtok_mm.analysis import measure_tokens, plot_tokens
from condtok_mm.analysis.images import image_pipeline, load_image
from condtok_mm.engine.checked import (
    load_conditioned,
    load_config,
    make_run_folder,
    measuring_parser,
    select_images,
)


def main() -> None:
    args = measuring_parser(__doc__, 'token_conditioning').parse_args()
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    paths = select_images(args, cfg)
    model = load_conditioned(args, cfg)
    out_dir = make_run_folder(args.out_dir)
    pipeline = image_pipeline(cfg)
    reports = []
    for path in track(paths, description='tokens'):
        try:
            image = load_image(model, pipeline, path)
        except (AssertionError, OSError, cv2.error) as error:
            print(f'left out: {path} cannot be read ({error}).', file=sys.stderr)
            continue
        try:
            reports.append(measure_tokens(model.backbone, image, path.name))
        except ValueError as error:
            print(f'left out: {error}', file=sys.stderr)
    if not reports:
        sys.exit('no image could be measured.')
    plot_tokens(reports, out_dir / 'singular_values.png')
    (out_dir / 'tokens.json').write_text(json.dumps([asdict(r) for r in reports]))
    Console().print(make_table(reports, model.backbone.conditioner.extra_repr()))
    print(f'written: {out_dir}/tokens.json, {out_dir}/singular_values.png')


def make_table(reports, title: str) -> Table:
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption='kappa over the rank of X; "at floor": over the directions above the '
        'noise floor; growth: of the Frobenius norm',
    )
    table.add_column('image', overflow='ellipsis', no_wrap=True, max_width=18)
    names = ('N x D', 'rank', 'kappa(X)', 'kappa(X+C)', 'at floor', 'growth')
    for name in names:
        table.add_column(name, justify='right', no_wrap=True)
    for report in reports:
        table.add_row(
            report.name,
            f'{report.num_tokens} x {report.channels}',
            str(report.rank),
            f'{report.kappa_before:.3g}',
            f'{report.kappa_after:.3g}',
            f'{report.kappa_above_floor:.3g}',
            f'{report.growth:.2f}',
        )
    return table


if __name__ == '__main__':
    main()
