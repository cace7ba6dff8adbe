"""Images of a file: there, readable, of the size that it says, and not filtered out."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mmdet.registry import TRANSFORMS
from mmengine.fileio import get_file_backend, join_path
from mmengine.fileio.backends import LocalBackend

from .coco_objects import ObjectCounts
from .coco_sources import CocoSource
from .findings import Findings, Kind

IMAGE_TWICE = Kind(
    'image ids that occur twice',
    'Only the last of them is read, with the annotations of all. Give each its own',
)
SHARED_FILE = Kind(
    'files that several images name',
    'What is annotated in one of them is background in the others. Merge them under '
    'one id; to see images more often, use RepeatDataset',
)
NO_FOLDER = Kind(
    'data sets without data_prefix.img',
    'CocoDataset needs it. Set the folder of the images there',
)
MISSING = Kind(
    'image files that do not exist',
    'Loading stops at them. Get them, mend file_name, data_root or data_prefix.img, or '
    'remove their entries',
)
UNREADABLE = Kind(
    'image files that cannot be decoded',
    'Loading stops at them. Get them again, or remove their entries',
)
SIZE = Kind(
    'images of another size than the json says',
    'Boxes and masks would not fit. Annotate the images as they are (width and height '
    'swapped: EXIF turns them)',
)
EMPTY_FILTERED = Kind(
    'images without annotations',
    'filter_empty_gt=True leaves them out. To learn background from them, set it to '
    'False',
    error=False,
)
EMPTY_KEPT = Kind(
    'images without objects to learn',
    'They are trained on as background. To leave out those without annotations, set '
    'filter_cfg=dict(filter_empty_gt=True)',
    error=False,
)
SMALL_FILTERED = Kind(
    'images below filter_cfg.min_size',
    'They are left out. To train on them, lower min_size',
    error=False,
)


def check_image_ids(images: list[dict], findings: Findings) -> dict:
    """Look for images that are taken for one another.

    Args:
        images (list[dict]): Of a file.
        findings (Findings): Where faults are noted.

    Returns:
        dict: Ids to images, the last of each id as mmdet takes it.
    """
    by_id, by_file = {}, {}
    for image in images:
        number, name = image['id'], image['file_name']
        if number in by_id:
            findings.add(IMAGE_TWICE, f'image {number} ({name})')
        elif name in by_file:
            findings.add(SHARED_FILE, f'{name}: images {by_file[name]} and {number}')
        by_id[number] = image
        by_file[name] = number
    return by_id


def check_files(
    source: CocoSource,
    images: list[dict],
    findings: Findings,
    decode: bool,
    track: Callable,
) -> None:
    """Look for images that cannot be loaded.

    Args:
        source (CocoSource): Where they are, and how they are read.
        images (list[dict]): To look for.
        findings (Findings): Where faults are noted.
        decode (bool): Whether to read every image, as the pipeline of the config does;
            else they are only looked for, and only on local disks.
        track (Callable): Shows progress over an iterable of a length.
    """
    if source.image_folder is None:
        findings.add(NO_FOLDER, source.keys[0])
        return
    backend = get_file_backend(source.image_folder, backend_args=source.backend_args)
    if not decode and not isinstance(backend, LocalBackend):
        return
    load = TRANSFORMS.build(source.load_image) if decode else None

    def look(image: dict) -> tuple[Kind, str] | None:
        path = join_path(source.image_folder, image['file_name'])
        if not backend.isfile(path):
            return MISSING, path
        if not decode:
            return None
        try:
            height, width = load(dict(img_path=path))['img_shape']
        except Exception as error:
            return UNREADABLE, f'{path} ({type(error).__name__})'
        said = image['width'], image['height']
        if said != (width, height):
            return SIZE, f'{path} is {width} x {height}, not {said[0]} x {said[1]}'
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lookups = pool.map(look, images) if decode else map(look, images)
        for image, fault in zip(images, track(lookups, len(images)), strict=True):
            if fault:
                findings.add(fault[0], f'image {image["id"]}: {fault[1]}')


def check_filter(
    source: CocoSource, images: dict, objects: ObjectCounts, findings: Findings
) -> list[dict]:
    """Tell which images are not trained on.

    Args:
        source (CocoSource): With the filter.
        images (dict): Ids to images.
        objects (ObjectCounts): What there is in them.
        findings (Findings): Where they are noted.

    Returns:
        list[dict]: Images that are left.
    """
    left = []
    min_size = source.filter_cfg.get('min_size', 0)
    for number, image in images.items():
        name = f'image {number} ({image["file_name"]})'
        empty = number not in objects.annotated
        if empty and source.filter_cfg.get('filter_empty_gt', False):
            findings.add(EMPTY_FILTERED, name)
        elif min(image['width'], image['height']) < min_size:
            findings.add(SMALL_FILTERED, name)
        else:
            left.append(image)
            if not objects.by_image[number]:
                findings.add(EMPTY_KEPT, name)
    return left
