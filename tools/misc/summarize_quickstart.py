"""Print what the quickstart reached and where its files are."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=Path)
    parser.add_argument('config')
    args = parser.parse_args()
    test = newest(args.folder / 'test')
    metrics = json.loads((test / f'{test.name}.json').read_text())
    reports = json.loads((newest(args.folder / 'tokens') / 'tokens.json').read_text())
    before = sum(report['kappa_before'] for report in reports) / len(reports)
    after = sum(report['kappa_after'] for report in reports) / len(reports)
    above = sum(report['kappa_above_floor'] for report in reports) / len(reports)
    lines = [
        f'box  mAP {metrics["coco/bbox_mAP"]:.3f}   '
        f'AP50 {metrics["coco/bbox_mAP_50"]:.3f}',
        f'mask mAP {metrics["coco/segm_mAP"]:.3f}   '
        f'AP50 {metrics["coco/segm_mAP_50"]:.3f}',
        f'condition number of the tokens {before:.3g}, conditioned {after:.3g};',
        f'{above:.3g} over the directions above the noise floor (2.48 at most)',
        '',
        f'pictures    {test / "predictions"}  (truth left, prediction right)',
        f'tokens      {newest(args.folder / "tokens") / "singular_values.png"}',
        f'logs        {args.folder / "train.log"}, {args.folder / "test.log"}',
        f'checkpoint  {(args.folder / "train" / "last_checkpoint").read_text()}',
    ]
    Console().print(Panel('\n'.join(lines), title='condtok_mm quickstart'))
    print(
        'Next, on your own COCO-format data (the whole config is under "Your own '
        f'data" in README.md):\n{sys.executable} tools/train.py {args.config} '
        '--work-dir work_dirs/mine --cfg-options '
        'train_dataloader.dataset.data_root=YOUR_DATA/'
    )


def newest(folder: Path) -> Path:
    """Return the newest run in a folder of runs that are named by their start."""
    return max(path for path in folder.iterdir() if path.name[:2] == '20')


if __name__ == '__main__':
    main()
