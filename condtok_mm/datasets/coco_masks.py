"""Masks that mmdet cannot load, or loads as nothing."""

from collections.abc import Iterable
from math import isfinite

from pycocotools import mask as mask_utils

from .findings import Kind

NO_MASK = Kind(
    'objects without a mask',
    'Loading masks stops with a KeyError. Remove them, give them a mask, or train a '
    'detector of boxes (with_mask=False)',
)
NOT_A_MASK = Kind(
    'masks that are neither polygons nor RLE',
    'Loading stops. Write a list of polygons [[x1, y1, x2, y2, x3, y3, ...], ...], or '
    'RLE {size: [height, width], counts: ...} that adds up to height x width',
)
RLE_SIZE = Kind(
    'RLE masks of another size than their image',
    'Loading stops. Encode them at the height and width of the image',
)
LOST_RLE = Kind(
    'RLE masks under LoadAnnotations(poly2mask=False)',
    'This setting keeps polygons only: these objects are not learnt. Set '
    'poly2mask=True in the pipeline',
)
EMPTY_MASK = Kind(
    'objects whose mask is empty or has no polygon of three points',
    'They have no mask to learn from. Remove or redraw them',
    error=False,
)


def mask_fault(mask: object, width: int, height: int, poly2mask: bool) -> Kind | None:
    """Tell what mmdet would make of a mask.

    Args:
        mask (object): The ``segmentation`` of an annotation.
        width (int): Of the image.
        height (int): Of the image.
        poly2mask (bool): As ``LoadAnnotations`` is told.

    Returns:
        Kind | None: What is wrong; None if the mask can be learnt from.
    """
    if not mask:
        return NO_MASK
    if isinstance(mask, list):
        return _polygon_fault(mask)
    if not isinstance(mask, dict):
        return NOT_A_MASK
    return _rle_fault(mask, width, height) if poly2mask else LOST_RLE


def all_finite(numbers: Iterable) -> bool:
    """Tell whether all of a few values are finite numbers.

    Args:
        numbers (Iterable): Values of any type.

    Returns:
        bool: Whether their sum is one; it is quicker to look at.
    """
    try:
        return isfinite(sum(numbers))
    except (TypeError, OverflowError):
        return False


def _polygon_fault(polygons: list) -> Kind | None:
    usable = False
    for polygon in polygons:
        if not isinstance(polygon, list):
            return NOT_A_MASK
        if len(polygon) < 6 or len(polygon) % 2:
            continue
        if not all_finite(polygon):
            return NOT_A_MASK
        usable = usable or min(polygon[::2]) < max(polygon[::2])
    return None if usable else EMPTY_MASK


def _rle_fault(rle: dict, width: int, height: int) -> Kind | None:
    size, counts = rle.get('size'), rle.get('counts')
    if not isinstance(size, list) or not isinstance(counts, list | str):
        return NOT_A_MASK
    if size != [height, width]:
        return RLE_SIZE
    if isinstance(counts, str):
        return None if mask_utils.area(rle) else EMPTY_MASK
    if not all(isinstance(n, int) and n >= 0 for n in counts):
        return NOT_A_MASK
    if sum(counts) != width * height:
        return NOT_A_MASK
    return None if sum(counts[1::2]) else EMPTY_MASK
