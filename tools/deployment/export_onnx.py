"""Export the backbone and neck of a detector to ONNX, for any batch, height and width.

Heads, the normalisation of images and post-processing are not exported.
"""

import argparse
import sys
from pathlib import Path

import torch
from mmdet.utils import register_all_modules
from mmengine.config import DictAction
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from condtok_mm._stack import release
from condtok_mm.engine.checked import load_config, load_detector

MIN_TORCH = (2, 5)
EXAMPLE_HW = (512, 768)
"""Size of the traced image. Every map has more than two windows on each side."""
CHECKED = ((1, 1, 2), (2, 3, 4), (3, 5, 3), (1, 25, 42))
"""Batch, height and width, in multiples of the divisor, that the file is run on."""


class Features(nn.Module):
    """What is exported: images in, maps out."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self.neck = detector.neck if detector.with_neck else nn.Identity()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Extract the maps of normalised images (B, 3, H, W)."""
        return tuple(self.neck(self.backbone(images)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    parser.add_argument('checkpoint', nargs='?', help='weights; random without')
    parser.add_argument('--out', required=True, help='the file to write, .onnx')
    parser.add_argument('--size-divisor', type=int, default=32)
    parser.add_argument('--overwrite', action='store_true')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        import onnxruntime  # noqa: PLC0415
        import onnxscript  # noqa: F401, PLC0415
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install 'condtok_mm[onnx]'.")
    out = Path(args.out)
    if out.exists() and not args.overwrite:
        sys.exit(f'{out} exists already; name another --out, or --overwrite it.')
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f'{out.parent} cannot be made ({error}); name another --out.')
    if args.size_divisor < 1 or any(side % args.size_divisor for side in EXAMPLE_HW):
        sys.exit(
            f'--size-divisor must divide {EXAMPLE_HW}, but got {args.size_divisor}.'
        )
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    detector = load_detector(cfg, args.checkpoint, 'cpu')
    if release(torch.__version__) < MIN_TORCH:
        sys.exit(
            f'exporting needs torch {".".join(map(str, MIN_TORCH))} or newer, but this '
            f"is {torch.__version__}, which cannot trace mmengine's attention. Export "
            'in an environment with the maintained stack, which reads the same files.'
        )
    model = Features(detector).eval()
    use_products_only(model.backbone)
    export(model, out, args.size_divisor)
    session = onnxruntime.InferenceSession(str(out))
    Console().print(compare(model, session, args.size_divisor))
    print(
        f'written: {out}, with images (batch, 3, height, width) normalised as in the '
        f'config, sides multiples of {args.size_divisor}. Not in it: normalisation, '
        'RPN, heads, post-processing.'
    )


def use_products_only(backbone: nn.Module) -> None:
    """Choose the solver that ONNX has operators for."""
    conditioner = getattr(backbone, 'conditioner', None)
    if conditioner is not None and conditioner.preconditioner is None:
        conditioner.solver = 'newton_schulz'


def export(model: nn.Module, out: Path, divisor: int) -> None:
    batch = torch.export.Dim('batch', min=1, max=2**10)
    height, width = (torch.export.Dim(n, min=1, max=2**10) for n in ('rows', 'columns'))
    with torch.no_grad():
        program = torch.onnx.export(
            model,
            (torch.randn(2, 3, *EXAMPLE_HW),),
            dynamo=True,
            dynamic_shapes=({0: batch, 2: divisor * height, 3: divisor * width},),
            input_names=['images'],
        )
    program.save(str(out))


@torch.no_grad()
def compare(model: nn.Module, session, divisor: int) -> Table:
    """Largest difference to PyTorch, relative to the largest value of a map."""
    table = Table(title='ONNX Runtime against PyTorch, on random images')
    table.add_column('images')
    table.add_column('difference', justify='right')
    for batch, rows, columns in CHECKED:
        images = torch.randn(batch, 3, rows * divisor, columns * divisor)
        maps = session.run(None, {'images': images.numpy()})
        difference = max(
            ((torch.from_numpy(actual) - map_).abs().max() / map_.abs().max()).item()
            for actual, map_ in zip(maps, model(images), strict=True)
        )
        table.add_row(' x '.join(map(str, images.shape)), f'{difference:.1e}')
    return table


if __name__ == '__main__':
    main()
