"""Condition numbers of the tokens over the training, from the logs of runs."""

import argparse
import sys
from pathlib import Path

from condtok_mm.analysis.conditioning_logs import plot_conditioning, read_conditioning


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'runs',
        metavar='RUN',
        nargs='+',
        help='work dir of a run with ConditionNumberHook, or a scalars.json',
    )
    parser.add_argument(
        '--out', default='conditioning.png', help='picture to write, .png'
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    out = Path(args.out)
    if out.suffix != '.png':
        sys.exit(f'--out must end in .png, but got {out}.')
    try:
        runs = {run: read_conditioning(run) for run in args.runs}
        out.parent.mkdir(parents=True, exist_ok=True)
        plot_conditioning(runs, out)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f'written: {out}')


if __name__ == '__main__':
    main()
