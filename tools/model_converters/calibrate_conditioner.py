"""Replace the conditioner's per-image matrix P by one that is measured on images.

The checkpoint that is written gives every image the same P; with --fold P is multiplied
into the patch embedding, and stock classes load the checkpoint without condtok_mm.
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import cv2
import torch
from mmdet.utils import register_all_modules
from mmengine.config import Config, DictAction
from mmengine.runner import Runner
from rich.console import Console
from rich.progress import track
from rich.table import Table

from condtok_mm.analysis import measure_tokens
from condtok_mm.analysis.images import find_images, image_pipeline, load_image
from condtok_mm.checkpoints import read_checkpoint
from condtok_mm.conditioning import calibrate_conditioner, fold_conditioner
from condtok_mm.conditioning.attach import conditioned_layer
from condtok_mm.engine.checked import load_config, load_detector


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config with a conditioned backbone')
    parser.add_argument('checkpoint', help='its weights')
    parser.add_argument('--out', required=True, help='checkpoint to write')
    parser.add_argument(
        '--images', nargs='+', help='images or folders; the test set without'
    )
    parser.add_argument('--max-images', type=int, default=64)
    parser.add_argument('--fold', action='store_true', help='fold P into the embedding')
    parser.add_argument('--eval', action='store_true', help='test both on the test set')
    parser.add_argument('--overwrite', action='store_true')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args()


def check_output(args: argparse.Namespace) -> Path:
    """The file to write, after all that could be wrong with it."""
    out = Path(args.out)
    if out.suffix != '.pth':
        sys.exit(f'--out must end in .pth, but got {out}.')
    if args.max_images < 1:
        sys.exit(f'--max-images must be at least 1, but got {args.max_images}.')
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f'{out.parent} cannot be made ({error}); name another --out.')
    for path in (out, out.with_suffix('.json')):
        if path.exists() and not args.overwrite:
            sys.exit(f'{path} exists already; name another --out, or --overwrite it.')
    return out


def main() -> None:
    args = parse_args()
    out = check_output(args)
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    own = load_detector(cfg, args.checkpoint, args.device)
    try:
        paths = find_images(args.images, cfg)[: args.max_images]
    except FileNotFoundError as error:
        sys.exit(f'{error}; name what to calibrate on by --images.')
    pipeline = image_pipeline(cfg)
    try:
        conditioned_layer(own.backbone)
        if own.backbone.conditioner.preconditioner is not None:
            sys.exit(f'{args.checkpoint} is calibrated already.')
        fixed = copy.deepcopy(own)
        progress = track(paths, description='calibrating')
        calibrate_conditioner(
            fixed.backbone, (load_image(own, pipeline, path) for path in progress)
        )
        written = copy.deepcopy(fixed)
        if args.fold:
            fold_conditioner(written.backbone)
    except ValueError as error:
        sys.exit(f'{args.config}: {error}')
    except (AssertionError, OSError, cv2.error) as error:
        sys.exit(f'an image cannot be read: {error}')
    rows = [
        compare(own, fixed, load_image(own, pipeline, path), path.name)
        for path in track(paths, description='comparing')
    ]
    report = dict(images=rows)
    if args.eval:
        try:
            report['metrics'] = {
                'per image': evaluate(cfg, own, out),
                'calibrated': evaluate(cfg, fixed, out),
            }
        except FileNotFoundError as error:
            sys.exit(f'--eval needs the test set of the config: {error}')
    meta = read_checkpoint(args.checkpoint).get('meta', {})
    torch.save(dict(meta=meta, state_dict=written.state_dict()), out)
    out.with_suffix('.json').write_text(json.dumps(report, indent=2))
    console = Console()
    for table in make_tables(report):
        console.print(table)
    print(f'written: {out} and {out.with_suffix(".json")}')
    if args.fold:
        print('folded: test it with model.backbone.conditioner=None, or a stock class.')


@torch.no_grad()
def compare(own, fixed, image, name: str) -> dict:
    """What a constant P changes for one image."""
    before = measure_tokens(own.backbone, image, name)
    after = measure_tokens(fixed.backbone, image, name)
    pairs = zip(own.backbone(image), fixed.backbone(image), strict=True)
    return dict(
        image=name,
        kappa=before.kappa_before,
        kappa_per_image=before.kappa_after,
        kappa_calibrated=after.kappa_after,
        above_floor_per_image=before.kappa_above_floor,
        above_floor_calibrated=after.kappa_above_floor,
        feature_difference=[((a - b).norm() / a.norm()).item() for a, b in pairs],
    )


def evaluate(cfg: Config, detector, out: Path) -> dict:
    """Metrics of a detector on the config's test set."""
    cfg = copy.deepcopy(cfg)
    cfg.load_from = None
    cfg.work_dir = str(out.parent / f'{out.stem}_eval')
    runner = Runner.from_cfg(cfg)
    runner.model.load_state_dict(detector.state_dict())
    return {name: float(value) for name, value in runner.test().items()}


def make_tables(report: dict) -> list[Table]:
    table = Table(
        title='one P for all images, against one for each',
        caption='kappa over the rank of X, and over the directions above the floor; '
        'features: relative difference of the backbone, level by level',
    )
    table.add_column('image', overflow='ellipsis', max_width=16)
    for name in ('X', 'each', 'one', 'each, floor', 'one, floor', 'features'):
        table.add_column(name, justify='right')
    for row in report['images']:
        *kappas, features = list(row.values())[1:]
        levels = ' '.join(f'{value:.1%}' for value in features)
        table.add_row(row['image'], *(f'{kappa:.3g}' for kappa in kappas), levels)
    if 'metrics' not in report:
        return [table]
    metrics = Table(title='on the test set')
    metrics.add_column('metric')
    for name in report['metrics']:
        metrics.add_column(name, justify='right')
    for name in report['metrics']['per image']:
        values = (scores[name] for scores in report['metrics'].values())
        metrics.add_row(name, *(f'{value:.3f}' for value in values))
    return [table, metrics]


if __name__ == '__main__':
    main()
