"""Draw textured shapes that hide one another, annotated as COCO does it.

The set is made, not downloaded: the same arguments give the same files. Its layout is
that of COCO, so ``mmdet.datasets.CocoDataset`` reads it::

    ROOT/annotations/instances_train.json    ROOT/train/000001.png ...
    ROOT/annotations/instances_val.json      ROOT/val/000001.png ...
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as mask_utils
from rich.progress import track

from ..arguments import check_flag, check_integer, check_type


def _ring(radii: list[float], start: float = 0.0) -> np.ndarray:
    """Place vertices of these radii at equal angles around the origin."""
    angles = start + np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.c_[radii]


_CROSS = [(3, 1), (1, 1), (1, 3), (-1, 3), (-1, 1), (-3, 1)]

_OUTLINES = {
    'disc': _ring([1.0] * 48),
    'square': _ring([1.2] * 4, start=np.pi / 4),
    'triangle': _ring([1.35] * 3, start=-np.pi / 2),
    'star': _ring([1.4, 0.6] * 5, start=-np.pi / 2),
    'cross': 0.42 * np.array(_CROSS + [(-x, -y) for x, y in _CROSS]),
}

CATEGORIES = tuple(_OUTLINES)

_SPLITS = ('train', 'val')
_GENERATOR = 'condtok_mm.datasets.shapes'
# Raise it with every change to what is drawn, so that older sets are not kept.
_GENERATOR_VERSION = 3

_MIN_AREA = 24
_MIN_IOU = 0.9
_EMPTY_SHARE = 0.03
_CROWD_SHARE = 0.05


@dataclass
class Instance:
    """One annotated object, or one crowd region.

    Attributes:
        category_id: Its place in :data:`CATEGORIES`, counted from 1.
        mask: Boolean ``(height, width)`` array of the part that can be seen.
        iscrowd: Whether the mask covers a cluster of objects.
    """

    category_id: int
    mask: np.ndarray
    iscrowd: bool = False


def draw_image(
    rng: np.random.Generator, image_size: int
) -> tuple[np.ndarray, list[Instance]]:
    """Draw one picture and say what can be seen in it.

    Args:
        rng: Source of every choice made.
        image_size: Longest side an image may have. Height and width are drawn
            independently, from 10/14 of it upwards.

    Returns:
        The picture, ``(height, width, 3)`` uint8 in BGR order, and its instances, whose
        masks do not overlap.
    """
    height, width = (image_size * rng.integers(10, 15, size=2) // 14).tolist()
    image = _draw_background(rng, height, width)
    instances = []
    if rng.random() >= _EMPTY_SHARE:
        if rng.random() < _CROWD_SHARE:
            instances.append(_draw_crowd(rng, image))
        for _ in range(rng.integers(3, 8)):
            _draw_object(rng, image, instances, 0.07 * image_size, 0.26 * image_size)
    image += rng.normal(0, rng.uniform(2, 7), image.shape)
    return image.clip(0, 255).round().astype(np.uint8), instances


def make_shapes(
    root: str | Path,
    num_train: int = 360,
    num_val: int = 80,
    *,
    image_size: int = 224,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Make the set of shapes at ``root``, unless it is there already.

    The set is made beside ``root`` and moved there once it is whole.

    Args:
        root: Folder to make.
        num_train: Number of images to train on.
        num_val: Number of images held out.
        image_size: Longest side an image may have.
        seed: Another seed draws other images. An image depends on this, on
            ``image_size`` and on its own number, not on how many others there are.
        overwrite: Replace a set that this function made earlier.
        progress: Show a progress bar, and say so when an existing set is kept.

    Returns:
        ``root`` as a path.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.
        FileExistsError: ``root`` holds anything but a set made with these arguments,
            and may not be replaced.
    """
    arguments = {
        'num_train': num_train,
        'num_val': num_val,
        'image_size': image_size,
        'seed': seed,
    }
    for (name, value), least in zip(arguments.items(), (1, 1, 64, 0), strict=True):
        check_integer(name, value, least)
    check_flag('overwrite', overwrite)
    check_flag('progress', progress)
    check_type('root', root, str | Path, 'the path of a folder')

    root = Path(root)
    target = root.resolve()
    occupied = target.exists() and not (target.is_dir() and _is_empty(target))
    if occupied and not _may_replace(target, arguments, overwrite):
        if progress:
            print(f'{root} holds this set already and is kept as it is.')
        return root

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f'.{target.name}-', dir=target.parent
    ) as staging:
        made = Path(staging, 'made')
        for split in _SPLITS:
            _make_split(made, split, arguments, progress)
        target.mkdir(exist_ok=True)
        _move_children(target, Path(staging, 'replaced'))
        _move_children(made, target)
    return root


def _move_children(source: Path, target: Path) -> None:
    """Move what a folder holds, and leave the folder: it may be a working directory."""
    target.mkdir(exist_ok=True)
    for child in list(source.iterdir()):
        child.rename(target / child.name)


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def _may_replace(root: Path, arguments: dict, overwrite: bool) -> bool:
    """Tell replace (True) from keep (False), and raise where neither is allowed."""
    if not root.is_dir():
        raise FileExistsError(f'{root} is a file; name another folder.')
    recorded = _recorded_arguments(root)
    if recorded is None:
        names = sorted(path.name for path in root.iterdir())
        found = ', '.join(names[:3]) + (', ...' if len(names) > 3 else '')
        raise FileExistsError(
            f'{root} holds something that was not made here ({found}) and is left as '
            'it is; name another folder.'
        )
    if overwrite:
        return True
    if recorded != {'version': _GENERATOR_VERSION, **arguments}:
        state = ', '.join(f'{name} {value}' for name, value in recorded.items())
    elif not all((root / name).is_file() for name in _image_names(arguments)):
        state = 'these same arguments, but images are missing'
    else:
        return False
    raise FileExistsError(
        f'{root} holds a set of shapes made with {state}; name another folder or '
        'replace it with overwrite=True (--overwrite).'
    )


def _recorded_arguments(root: Path) -> dict | None:
    """Read what a set was made with; None where ``root`` is not, or not only, a set."""
    try:
        infos = [
            json.loads((root / _annotation_name(split)).read_text())['info']
            for split in _SPLITS
        ]
        if any(info['generator'] != _GENERATOR for info in infos):
            return None
        arguments = infos[0]['arguments']
        known = {'preview.png', *map(_annotation_name, _SPLITS)}
        known.update(_image_names(arguments))
        recorded = {'version': infos[0]['generator_version'], **arguments}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    files = (path for path in root.rglob('*') if not path.is_dir())
    if any(path.relative_to(root).as_posix() not in known for path in files):
        return None
    return recorded


def _annotation_name(split: str) -> str:
    return f'annotations/instances_{split}.json'


def _image_names(arguments: dict) -> list[str]:
    return [
        f'{split}/{image_id:06d}.png'
        for split in _SPLITS
        for image_id in range(1, arguments[f'num_{split}'] + 1)
    ]


def _make_split(root: Path, split: str, arguments: dict, progress: bool) -> None:
    """Write the images of one split and its annotation file."""
    (root / split).mkdir(parents=True)
    images, annotations = [], []
    for image_id in track(
        range(1, arguments[f'num_{split}'] + 1), f'shapes/{split}', disable=not progress
    ):
        stream = np.random.SeedSequence(
            arguments['seed'], spawn_key=(_SPLITS.index(split), image_id)
        )
        image, instances = draw_image(
            np.random.default_rng(stream), arguments['image_size']
        )
        file_name = f'{image_id:06d}.png'
        path = root / split / file_name
        if not cv2.imwrite(str(path), image, [cv2.IMWRITE_PNG_COMPRESSION, 6]):
            raise OSError(f'{path} could not be written.')
        height, width = image.shape[:2]
        images.append(
            {'id': image_id, 'file_name': file_name, 'height': height, 'width': width}
        )
        for instance in instances:
            annotation = _annotate(instance)
            annotation['id'] = len(annotations) + 1
            annotation['image_id'] = image_id
            annotations.append(annotation)

    dataset = {
        'info': {
            'description': f'Generated shapes, {split} split',
            'generator': _GENERATOR,
            'generator_version': _GENERATOR_VERSION,
            'arguments': arguments,
        },
        'licenses': [],
        'images': images,
        'annotations': annotations,
        'categories': [
            {'id': category_id, 'name': name, 'supercategory': 'shape'}
            for category_id, name in enumerate(CATEGORIES, start=1)
        ],
    }
    path = root / _annotation_name(split)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dataset, sort_keys=True, separators=(',', ':')))


def _annotate(instance: Instance) -> dict:
    """Describe an instance in COCO's terms, but for the ids."""
    rle = mask_utils.encode(np.asfortranarray(instance.mask, dtype=np.uint8))
    polygons = None if instance.iscrowd else _trace(instance.mask, rle)
    return {
        'category_id': instance.category_id,
        'iscrowd': int(instance.iscrowd),
        'bbox': mask_utils.toBbox(rle).tolist(),
        'area': int(mask_utils.area(rle)),
        'segmentation': polygons
        or {'size': list(rle['size']), 'counts': rle['counts'].decode('ascii')},
    }


def _trace(mask: np.ndarray, rle: dict) -> list[list[float]] | None:
    """Outline a mask by polygons; None where they would not say the same.

    ``cv2.findContours`` runs through the centres of the border pixels, COCO's polygons
    run around them. Tracing an enlarged mask brings the two to an eighth of a pixel.
    """
    zoom = 4
    enlarged = mask.astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)
    contours, hierarchy = cv2.findContours(
        enlarged, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE
    )
    has_hole = (hierarchy[0, :, 3] >= 0).any()
    polygons = [
        ((cv2.approxPolyDP(contour, 0.6 * zoom, True).ravel() + 0.5) / zoom).tolist()
        for contour in contours
    ]
    if has_hole or min(map(len, polygons)) < 6:
        return None
    traced = mask_utils.merge(mask_utils.frPyObjects(polygons, *mask.shape))
    if mask_utils.iou([traced], [rle], [0]).item() < _MIN_IOU:
        return None
    return polygons


def _draw_background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Blend a smooth field of dim colours with stripes and blotches."""
    image = _smooth_field(rng, height, width, rng.integers(2, 5), 3) * 30
    image += rng.uniform(40, 110) + rng.uniform(-25, 25, size=3)
    stripes = _stripes(rng, height, width, period=rng.uniform(6, 40))
    image += rng.uniform(0, 16) * stripes[..., None]
    image += rng.uniform(4, 20) * _smooth_field(rng, height, width, 24, 1)
    return image.clip(0, 255)


def _draw_crowd(rng: np.random.Generator, image: np.ndarray) -> Instance:
    """Scatter tiny shapes of one category and return the region they fill."""
    height, width = image.shape[:2]
    category_id = int(rng.integers(len(CATEGORIES))) + 1
    centre = rng.uniform(0.3, 0.7, size=2) * (width, height)
    region = np.zeros((height, width), np.uint8)
    for _ in range(rng.integers(14, 30)):
        place = (centre + rng.normal(0, 13, size=2)).clip(4, (width - 4, height - 4))
        cover = _cover(rng, image.shape, category_id, place, rng.uniform(4, 6))
        _paint(rng, image, cover, period=6)
        region |= cover >> 7
    kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (9, 9))
    region = cv2.morphologyEx(region, cv2.MORPH_CLOSE, kernel)
    return Instance(category_id, region.astype(bool), iscrowd=True)


def _draw_object(
    rng: np.random.Generator,
    image: np.ndarray,
    instances: list[Instance],
    smallest: float,
    largest: float,
) -> None:
    """Draw one shape over the others, unless it would hide too much of one of them."""
    height, width = image.shape[:2]
    category_id = int(rng.integers(len(CATEGORIES))) + 1
    radius = np.exp(rng.uniform(np.log(smallest), np.log(largest)))
    place = rng.uniform(0.6 * radius, np.array([width, height]) - 0.6 * radius)
    cover = _cover(rng, image.shape, category_id, place, radius)
    mask = cover >= 128
    remains = [instance.mask & ~mask for instance in instances]
    for instance, rest in zip(instances, remains, strict=True):
        if rest.sum() < max(_MIN_AREA, 0.6 * instance.mask.sum()):
            return
    for instance, rest in zip(instances, remains, strict=True):
        instance.mask = rest
    _paint(rng, image, cover, period=max(5, 0.5 * radius))
    instances.append(Instance(category_id, mask))


def _cover(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    category_id: int,
    place: np.ndarray,
    radius: float,
) -> np.ndarray:
    """Tilt and stretch a shape; return how far it covers each pixel, 0 to 255."""
    stretch = np.exp(rng.uniform(-0.2, 0.2))
    angle = rng.uniform(-0.4, 0.4)
    cos, sin = np.cos(angle), np.sin(angle)
    outline = _OUTLINES[CATEGORIES[category_id - 1]] * (stretch, 1 / stretch)
    outline = place + radius * outline @ np.array([[cos, sin], [-sin, cos]])
    cover = np.zeros(shape[:2], np.uint8)
    points = np.round(outline * 16).astype(np.int32)
    cv2.fillPoly(cover, [points], 255, cv2.LINE_AA, shift=4)
    return cover


def _paint(
    rng: np.random.Generator, image: np.ndarray, cover: np.ndarray, period: float
) -> None:
    """Fill the covered pixels with a bright, patterned colour that stands out."""
    x, y, width, height = cv2.boundingRect(cover)
    box = np.s_[y : y + height, x : x + width]
    patch, weight = image[box], cover[box][..., None] / 255
    behind = (weight * patch).sum(axis=(0, 1)) / weight.sum()
    colour = rng.uniform(80, 255, size=3)
    while np.linalg.norm(colour - behind) < 110:
        colour = rng.uniform(80, 255, size=3)
    pattern = _stripes(rng, height, width, period)
    if rng.random() < 0.5:
        pattern = pattern * _stripes(rng, height, width, period)
    pattern = rng.uniform(0, 25) * pattern[..., None]
    pattern += rng.uniform(0, 30) * _smooth_field(rng, height, width, 3, 1)
    patch += weight * (colour + pattern - patch)


def _stripes(
    rng: np.random.Generator, height: int, width: int, period: float
) -> np.ndarray:
    """Make waves between -1 and 1 that run in some direction."""
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.ogrid[:height, :width]
    phase = (x * np.cos(angle) + y * np.sin(angle)) / period
    return np.sin(2 * np.pi * (phase + rng.random()))


def _smooth_field(
    rng: np.random.Generator, height: int, width: int, cells: int, channels: int
) -> np.ndarray:
    """Spread a coarse grid of values between -1 and 1 over an area."""
    grid = rng.uniform(-1, 1, size=(cells, cells, channels))
    field = cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC)
    return field.reshape(height, width, channels)
