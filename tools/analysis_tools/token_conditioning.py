"""Condition number of a model's embedded tokens, before and after the correction."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import cv2
from mmdet.utils import register_all_modules
from mmengine.config import DictAction
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from condtok_mm.analysis import measure_tokens, plot_tokens
from condtok_mm.analysis.images import find_images, image_pipeline, load_image
from condtok_mm.conditioning.attach import conditioned_layer
from condtok_mm.engine.checked import load_config, load_detector, make_run_folder


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config with a conditioned backbone')
    parser.add_argument('checkpoint', nargs='?', help='weights; random without')
    parser.add_argument(
        '--images', nargs='+', help='images or folders; the test set without'
    )
    parser.add_argument('--max-images', type=int, default=8)
    parser.add_argument('--out-dir', default='work_dirs/token_conditioning')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    if args.checkpoint and not Path(args.checkpoint).is_file():
        sys.exit(f'checkpoint {args.checkpoint} does not exist.')
    out_dir = make_run_folder(args.out_dir)
    try:
        paths = find_images(args.images, cfg)
    except FileNotFoundError as error:
        sys.exit(str(error))
    if len(paths) > args.max_images:
        print(f'measuring the first {args.max_images} of {len(paths)} images')
    paths = paths[: args.max_images]
    model = load_detector(cfg, args.checkpoint, args.device)
    pipeline = image_pipeline(cfg)
    try:
        conditioned_layer(model.backbone)
    except ValueError as error:
        sys.exit(f'{args.config}: {error} Use one of the condtok configs.')
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
