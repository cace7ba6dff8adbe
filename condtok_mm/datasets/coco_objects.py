"""Which annotations of a file become objects, and what becomes of the others."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .coco_masks import all_finite, mask_fault
from .coco_sources import CocoSource
from .findings import Findings, Kind

ANNOTATION_TWICE = Kind(
    'annotation ids that occur twice', 'The loader stops at them. Number them anew'
)
NO_IMAGE = Kind(
    'annotations of no image in the file',
    'They are left out silently. Add the images, mend image_id, or remove them',
)
NO_CATEGORY = Kind(
    'annotations of no category in the file',
    'They are left out silently. Add the category, mend category_id, or remove them',
)
NO_BOX = Kind(
    'objects whose bbox or area is not made of finite numbers',
    'The loader stops. Write bbox=[x, y, width, height] and area, or remove them',
)
OUTSIDE = Kind(
    'boxes that lie outside their image',
    'mmdet leaves the objects out. Mend or remove them',
    error=False,
)
DEGENERATE = Kind(
    'boxes less than a pixel wide or high, or with area 0',
    'mmdet leaves the objects out. Mend or remove them',
    error=False,
)
REACHING_OUT = Kind(
    'boxes that reach more than a pixel out of their image',
    'They are learnt like this. Clip them',
    error=False,
)
MOSTLY_OUT = Kind(
    'boxes that reach more than a pixel out of their image',
    'They are too many for slips. COCO writes [x, y, width, height], not two corners, '
    'in pixels of the image that the json describes. Convert them',
)
CROWD = Kind(
    'crowd regions (iscrowd=1)',
    'They are not learnt or counted as objects. If they are objects, set iscrowd to 0',
    error=False,
)
CROWD_VALUE = Kind(
    'annotations whose iscrowd is neither 0 nor 1',
    'Whatever Python takes for true is a crowd and is not learnt. Write 0 or 1',
)
NO_CROWD_FLAG = Kind(
    'annotations without iscrowd',
    "COCO's evaluation stops with a KeyError. Write 0",
)
IGNORED = Kind('annotations with ignore set', 'mmdet leaves them out', error=False)
ID_ZERO = Kind(
    'annotations with id 0',
    "COCO's evaluation takes 0 for unmatched: finding this object counts as a mistake. "
    'Number from 1',
    error=False,
)

OFTEN = 0.1
"""Share of boxes that reach out of their images, above which it is no slip."""


@dataclass
class ObjectCounts:
    """What the annotations of a file come to.

    Attributes:
        by_category (Counter): Category ids to the number of objects to learn.
        by_image (Counter): Image ids to the number of objects to learn.
        annotated (set): Ids of images with any annotation of a class, as the filter
            of mmdet sees it.
    """

    by_category: Counter = field(default_factory=Counter)
    by_image: Counter = field(default_factory=Counter)
    annotated: set = field(default_factory=set)


def check_objects(
    source: CocoSource,
    annotations: Iterable[dict],
    images: dict,
    categories: set,
    kept: set,
    findings: Findings,
) -> ObjectCounts:
    """Go through the annotations as mmdet does.

    Args:
        source (CocoSource): How the file is read.
        annotations (Iterable[dict]): Of the file.
        images (dict): Ids to the images of the file.
        categories (set): Ids of the categories of the file.
        kept (set): Ids of those that are learnt.
        findings (Findings): Where faults are noted.

    Returns:
        ObjectCounts: What is left to learn.
    """
    result, seen = ObjectCounts(), set()
    for annotation in annotations:
        _check_id(source, annotation, seen, findings)
        image = images.get(annotation['image_id'])
        category_id = annotation['category_id']
        if image is None:
            findings.add(NO_IMAGE, _name(annotation))
            continue
        if category_id not in categories:
            findings.add(NO_CATEGORY, f'{_name(annotation)}: category {category_id}')
        if category_id not in kept:
            continue
        result.annotated.add(image['id'])
        if _is_object(source, annotation, image, findings):
            result.by_category[category_id] += 1
            result.by_image[image['id']] += 1
    if findings.counts[REACHING_OUT] > OFTEN * len(seen):
        findings.move(REACHING_OUT, MOSTLY_OUT)
    return result


def _check_id(
    source: CocoSource, annotation: dict, seen: set, findings: Findings
) -> None:
    number = annotation['id']
    if number in seen:
        findings.add(ANNOTATION_TWICE, _name(annotation))
    seen.add(number)
    if source.evaluated:
        if number == 0:
            findings.add(ID_ZERO, _name(annotation))
        if 'iscrowd' not in annotation:
            findings.add(NO_CROWD_FLAG, _name(annotation))


def _is_object(
    source: CocoSource, annotation: dict, image: dict, findings: Findings
) -> bool:
    """Whether an annotation of a class is trained on as an object."""
    if annotation.get('ignore'):
        findings.add(IGNORED, _name(annotation, image))
        return False
    crowd = annotation.get('iscrowd', 0)
    if crowd not in (0, 1):
        findings.add(CROWD_VALUE, f'{_name(annotation, image)}: {crowd!r}')
    elif crowd:
        findings.add(CROWD, _name(annotation, image))
    width, height = image['width'], image['height']
    fault = _box_fault(annotation.get('bbox'), annotation.get('area'), width, height)
    if fault:
        shown = f'bbox {annotation.get("bbox")}, area {annotation.get("area")}'
        findings.add(fault, f'{_name(annotation, image)}: {shown[:80]}')
    if fault not in (None, REACHING_OUT):
        return False
    if source.masks:
        mask = annotation.get('segmentation')
        if fault := mask_fault(mask, width, height, source.poly2mask):
            findings.add(fault, _name(annotation, image))
            return False
    return not crowd


def _box_fault(box: object, area: object, width: int, height: int) -> Kind | None:
    four = isinstance(box, list) and len(box) == 4
    if not four or not all_finite([*box, area]):
        return NO_BOX
    left, top, across, down = box
    right, bottom = left + across, top + down
    if across < 1 or down < 1 or area <= 0:
        return DEGENERATE
    if left >= width or top >= height or right <= 0 or bottom <= 0:
        return OUTSIDE
    if min(left, top) < -1 or right > width + 1 or bottom > height + 1:
        return REACHING_OUT
    return None


def _name(annotation: dict, image: dict | None = None) -> str:
    name = f'annotation {annotation["id"]} of image {annotation["image_id"]}'
    return f'{name} ({image["file_name"]})' if image else name
