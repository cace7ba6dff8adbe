"""Convert a checkpoint of any layout to the backbone of a config.

Reads timm, DeiT, MAE, DINO, DINOv2, Swin, XCiT, mmpretrain, mmdet and detectron2 ViTDet
files, .pth or .safetensors, executes nothing in them, resizes what depends on image,
window or patch size, and writes a state dict that stock classes load too.
"""

import argparse
import sys
from pathlib import Path

import torch
from mmdet.utils import register_all_modules
from mmengine.config import DictAction
from mmengine.registry import MODELS, init_default_scope

from condtok_mm.checkpoints import MIN_MATCHED, convert_checkpoint, read_checkpoint
from condtok_mm.engine.checked import load_config


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config with the backbone to convert for')
    parser.add_argument('checkpoint', help='file or URL')
    parser.add_argument('--out', required=True, help='checkpoint to write, .pth')
    parser.add_argument('--prefix', help='of the backbone in the file, if not found')
    parser.add_argument(
        '--min-matched',
        type=float,
        default=MIN_MATCHED,
        help=f"least share of the backbone's keys (default {MIN_MATCHED})",
    )
    parser.add_argument('--overwrite', action='store_true')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    out = Path(args.out)
    if out.suffix != '.pth':
        sys.exit(f'--out must end in .pth, but got {out}.')
    if out.exists() and not args.overwrite:
        sys.exit(f'{out} exists already; name another --out, or --overwrite it.')
    register_all_modules(init_default_scope=False)
    cfg = load_config(args.config, args.cfg_options)
    init_default_scope(cfg.get('default_scope') or 'mmdet')
    try:
        checkpoint = read_checkpoint(args.checkpoint)
        backbone = MODELS.build(cfg.model.backbone)
        state_dict, report = convert_checkpoint(checkpoint, backbone, args.prefix)
        print(report)
        report.check(args.min_matched)
    except (OSError, ImportError, TypeError, ValueError) as error:
        sys.exit(f'{args.checkpoint} cannot be converted: {error}')
    weights = {k: v for k, v in state_dict.items() if k not in report.unexpected}
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state_dict=weights), out)
    print(f'written: {out} ({len(weights)} tensors), for model.backbone.init_cfg.')


if __name__ == '__main__':
    main()
