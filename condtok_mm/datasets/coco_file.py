"""Reading an annotation file of COCO, and setting aside what is none of its entries."""

import json
from dataclasses import dataclass
from pathlib import PurePath

from mmengine.fileio import exists, get_local_path

from .coco_sources import CocoSource
from .findings import Findings, Kind

ID_TYPE = Kind(
    'ids that are missing or no integers',
    'Entries without an id stop the loader; ids of another type collide or do not '
    'survive the evaluation. Number them with integers and write the file again',
)
IMAGE_FIELDS = Kind(
    'images without file_name, or without a width and height above 0',
    'The loader needs all three. Add them, or remove the entry',
)
CATEGORY_NAME = Kind(
    'categories without a name', 'The loader finds categories by it. Name them'
)
NO_ENTRY = Kind(
    'list items that are no entries ({...})', 'The loader stops at them. Remove them'
)

SHAPES = 'data/shapes'
MAKE_SHAPES = 'python tools/dataset_converters/make_shapes.py'


@dataclass
class CocoFile:
    """What an annotation file holds, in its order.

    Attributes:
        images (list[dict]): With ``id``, ``file_name``, ``width`` and ``height``.
        annotations (list[dict]): With ``id``, ``image_id`` and ``category_id``.
        categories (list[dict]): With ``id`` and ``name``.
    """

    images: list[dict]
    annotations: list[dict]
    categories: list[dict]


def read_coco_file(source: CocoSource, findings: Findings) -> CocoFile:
    """Read an annotation file without mmdet, whose loader stops at some faults.

    Args:
        source (CocoSource): What to read.
        findings (Findings): Where entries are noted that are left out.

    Returns:
        CocoFile: The entries that can be checked further.

    Raises:
        ValueError: If there is no such file or it is not one of COCO, with the key of
            the config that names it.
    """
    key = f'{source.keys[0]}.ann_file'
    if not source.ann_file:
        raise ValueError(f'{key} is not set: name the annotation file there.')
    if not exists(source.ann_file, backend_args=source.backend_args):
        raise ValueError(_missing(key, source))
    content = _load(key, source)
    if not isinstance(content, dict):
        raise ValueError(
            f'{source.ann_file} ({key}) holds a JSON {type(content).__name__} instead '
            'of the object with images, annotations and categories that COCO has. '
            'Convert it, or name another file.'
        )
    for name in ('images', 'annotations', 'categories'):
        # A test set comes without annotations.
        optional = name == 'annotations' and not source.trains
        value = content.get(name, [] if optional else None)
        if not isinstance(value, list):
            found = type(value).__name__ if name in content else 'nothing'
            raise ValueError(
                f'{source.ann_file} ({key}) holds {found} instead of a list under '
                f'{name!r}. It is not in the format of COCO: convert it, or name '
                'another file.'
            )
    return CocoFile(
        _images(content['images'], findings),
        _annotations(content.get('annotations') or [], findings),
        _categories(content['categories'], findings),
    )


def _missing(key: str, source: CocoSource) -> str:
    root = source.data_root.rstrip('/')
    said = f' and data_root={source.data_root!r}' if root else ''
    if PurePath(root).parts[-2:] == PurePath(SHAPES).parts:
        remedy = f'Make the set: {MAKE_SHAPES} {root}'
    else:
        remedy = 'Put it there, or set the key.'
    return (
        f'annotation file {source.ann_file} does not exist; {key}{said} name it. '
        f'{remedy}'
    )


def _load(key: str, source: CocoSource) -> object:
    try:
        with (
            get_local_path(source.ann_file, backend_args=source.backend_args) as path,
            open(path, encoding='utf-8') as file,
        ):
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f'{source.ann_file} ({key}) cannot be read as JSON '
            f'({type(error).__name__}: {error}). Is it whole? Copy or convert it again.'
        ) from error


def _images(entries: list, findings: Findings) -> list[dict]:
    kept = []
    for image in _entries('images', entries, ('id',), findings):
        sides = image.get('width'), image.get('height')
        named = image.get('file_name') and isinstance(image['file_name'], str)
        if named and all(isinstance(s, int | float) and s > 0 for s in sides):
            kept.append(image)
        else:
            shown = {k: image.get(k) for k in ('file_name', 'width', 'height')}
            findings.add(IMAGE_FIELDS, f'image {image["id"]}: {shown}')
    return kept


def _annotations(entries: list, findings: Findings) -> list[dict]:
    keys = ('id', 'image_id', 'category_id')
    return _entries('annotations', entries, keys, findings)


def _categories(entries: list, findings: Findings) -> list[dict]:
    kept = []
    for category in _entries('categories', entries, ('id',), findings):
        if isinstance(category.get('name'), str):
            kept.append(category)
        else:
            findings.add(CATEGORY_NAME, f'category {category["id"]}')
    return kept


def _entries(
    name: str, entries: list, keys: tuple[str, ...], findings: Findings
) -> list[dict]:
    """Those entries whose ids can be looked up; the others are noted."""
    kept = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            findings.add(NO_ENTRY, f'{name}[{index}]: {str(entry)[:40]!r}')
            continue
        for key in keys:
            if type(entry.get(key)) is not int:
                value = str(entry.get(key, 'missing'))[:40]
                found = type(entry.get(key)).__name__
                findings.add(ID_TYPE, f'{name}[{index}].{key}: {value} ({found})')
        if all(isinstance(entry.get(key), int | float | str) for key in keys):
            kept.append(entry)
    return kept
