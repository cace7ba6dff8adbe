"""Feed random images to a detector, and say which of them break it.

Sizes from one pixel on, extreme shapes, photographs of nothing, black, constant and
checkered images, in batches of one to four, through the config's data preprocessor and
the whole detector. An error is a failure, and so is a feature or a prediction that is
inf or nan. Exits with 1 if there is one, after saying how to see it again.
"""

import argparse
import sys
from collections.abc import Callable

import cv2
import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.utils import register_all_modules
from mmengine.config import DictAction
from rich.progress import Progress
from torch import nn

from condtok_mm.engine.checked import load_config, load_detector

MAX_BATCH = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config')
    parser.add_argument('checkpoint', nargs='?', help='weights; random without')
    parser.add_argument('--count', type=int, default=2000, help='images, at least')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--max-size', type=int, default=2000, help='longest side')
    parser.add_argument('--only', type=int, help='number of the one batch to feed')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    args = parser.parse_args()
    for name, least in (('count', 1), ('seed', 0), ('max_size', 1), ('only', 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            option = name.replace('_', '-')
            sys.exit(f'--{option} must be at least {least}, but got {value}.')
    return args


def photograph(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth fields over several octaves, and noise."""
    image = rng.normal(120, 8, size=(height, width, 3))
    for octave in range(6):
        field = rng.normal(size=(2**octave + 1, 2**octave + 1, 3)) * 60 * 0.6**octave
        image += cv2.resize(field, (width, height), interpolation=cv2.INTER_LINEAR)
    return image.clip(0, 255)


def noise(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A random value in each channel of each pixel."""
    return rng.integers(0, 256, size=(height, width, 3))


def constant(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """One colour."""
    return np.broadcast_to(rng.integers(0, 256, size=3), (height, width, 3))


def black(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Zeros."""
    return np.zeros((height, width, 3))


def checkerboard(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Black and white squares, the smallest of one pixel."""
    side = rng.integers(1, 17)
    rows, columns = np.arange(height) // side, np.arange(width) // side
    board = 255 * ((rows[:, None] + columns) % 2)
    return np.repeat(board[..., None], 3, axis=2)


def bright_pixel(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Black, but for one pixel."""
    image = np.zeros((height, width, 3))
    image[rng.integers(height), rng.integers(width)] = 255
    return image


CONTENTS: tuple[Callable, ...] = (
    photograph,
    noise,
    constant,
    black,
    checkerboard,
    bright_pixel,
)


def draw_batch(
    seed: int, number: int, max_size: int
) -> tuple[list[torch.Tensor], list[str]]:
    """Images (3, H, W) of a batch, and what they are."""
    rng = np.random.default_rng((seed, number))
    images, names = [], []
    for _ in range(rng.integers(1, MAX_BATCH + 1)):
        # As many from 1 to 10 pixels as from 10 to 100, for each side.
        sides = np.exp(rng.uniform(0, np.log(max_size + 1), size=2)).astype(int)
        height, width = sides.clip(1, max_size).tolist()
        content = CONTENTS[rng.integers(len(CONTENTS))]
        image = content(rng, height, width).astype(np.uint8)
        images.append(torch.from_numpy(image.transpose(2, 0, 1).copy()))
        names.append(f'{content.__name__} of {height} x {width}')
    return images, names


def check_features(module: nn.Module, inputs: tuple, outputs: tuple) -> None:
    """Forward hook: predictions hide it if features are not finite."""
    if not all(map(is_finite, outputs)):
        raise FloatingPointError('features that hold inf or nan')


def is_finite(value: object) -> bool:
    return not torch.is_tensor(value) or bool(value.isfinite().all())


def find_fault(detector: nn.Module, images: list[torch.Tensor]) -> str | None:
    """What goes wrong with a batch; None if nothing does."""
    samples = []
    for index, image in enumerate(images):
        size = tuple(image.shape[1:])
        meta = dict(img_id=index, img_shape=size, ori_shape=size)
        samples.append(DetDataSample(metainfo=meta | dict(scale_factor=(1.0, 1.0))))
    try:
        with torch.no_grad():
            found = detector.test_step(dict(inputs=images, data_samples=samples))
    except Exception as error:
        lines = str(error).strip().splitlines() or ['']
        return f'{type(error).__name__}: {lines[0]}'
    for sample in found:
        for name, value in sample.pred_instances.items():
            if not is_finite(value):
                return f'predicted {name} that hold inf or nan'
    return None


def main() -> None:
    args = parse_args()
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    detector = load_detector(cfg, args.checkpoint, args.device)
    detector.backbone.register_forward_hook(check_features)
    number = args.only or 0
    fed = batches = failures = 0
    with Progress() as progress:
        task = progress.add_task('feeding', total=args.count)
        while fed < args.count:
            images, names = draw_batch(args.seed, number, args.max_size)
            if fault := find_fault(detector, images):
                failures += 1
                progress.console.print(
                    f'{fault}; images: {", ".join(names)}; again: --seed {args.seed} '
                    f'--max-size {args.max_size} --only {number}',
                    markup=False,
                    soft_wrap=True,
                )
            fed, batches, number = fed + len(images), batches + 1, number + 1
            progress.update(task, completed=fed)
            if args.only is not None:
                break
    print(f'{fed} images in {batches} batches, {failures} of them failed')
    sys.exit(failures > 0)


if __name__ == '__main__':
    main()
