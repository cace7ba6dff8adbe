"""Check what a config of a detector would train on; exit with 1 if it is wrong.

Names misspelt classes, missing images, objects without masks and the like by file and
id, and says what each category is called. tools/train.py does this by itself before it
trains, but for the test set and for --decode.
"""

import argparse
import sys

from mmengine.config import DictAction

from condtok_mm.datasets.coco_checks import check_datasets
from condtok_mm.engine.checked import load_config


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config of a detector')
    parser.add_argument(
        '--decode', action='store_true', help='read every image, compare its size'
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    cfg = load_config(args.config, args.cfg_options)
    if cfg.get('default_scope') == 'mmpretrain':
        sys.exit('this is the config of a classifier; only detectors can be checked.')
    reports, unknown = check_datasets(cfg, decode=args.decode)
    for report in reports:
        print(f'\n{report.text()}')
    for name in unknown:
        print(f'\nnot checked, as it does not read like CocoDataset: {name}')
    errors = sum(len(r.findings.errors()) + bool(r.failure) for r in reports)
    warnings = sum(len(r.findings.warnings()) for r in reports)
    print(f'\n{errors} kinds of errors, {warnings} kinds of warnings')
    sys.exit(1 if errors else 0)


if __name__ == '__main__':
    main()
