"""Make the generated set of shapes, sum it up and draw a preview of it."""

import argparse
import contextlib
import io
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
from pycocotools.coco import COCO

from condtok_mm.datasets import CATEGORIES, make_shapes

COLOURS = ((60, 60, 255), (60, 220, 60), (255, 120, 40), (40, 220, 255), (255, 60, 255))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('root', nargs='?', default='data/shapes', help='folder to make')
    parser.add_argument('--num-train', type=int, default=360)
    parser.add_argument('--num-val', type=int, default=80)
    parser.add_argument(
        '--image-size', type=int, default=224, help='longest side an image may have'
    )
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument(
        '--overwrite', action='store_true', help='replace a set made here earlier'
    )
    return parser.parse_args()


def summarise(split: str, coco: COCO) -> str:
    annotations = coco.dataset['annotations']
    crowds = [ann for ann in annotations if ann['iscrowd']]
    objects = [ann for ann in annotations if not ann['iscrowd']]
    empties = len(coco.imgs) - len({ann['image_id'] for ann in annotations})
    kinds = Counter(ann['category_id'] for ann in objects)
    areas = np.array([ann['area'] for ann in objects])
    small, large = (areas < 32**2).sum(), (areas >= 96**2).sum()
    polygons = sum(isinstance(ann['segmentation'], list) for ann in objects)
    per_category = ', '.join(
        f'{name} {kinds[category_id]}'
        for category_id, name in enumerate(CATEGORIES, start=1)
    )
    return '\n'.join(
        [
            f'{split}: {len(coco.imgs)} images ({empties} empty), '
            f'{len(objects)} objects, {len(crowds)} crowd regions',
            f'  {per_category}',
            f'  small {small}, medium {len(objects) - small - large}, large {large}',
            f'  polygons {polygons}, RLE {len(annotations) - polygons}',
        ]
    )


def draw_preview(
    folder: Path, coco: COCO, columns: int = 4, zoom: int = 2
) -> np.ndarray:
    """Outline the masks of the first images; crowd regions in white."""
    image_ids = sorted(coco.imgs)[: columns**2]
    side = zoom * max(max(i['height'], i['width']) for i in coco.loadImgs(image_ids))
    sheet = np.full((columns, columns, side, side, 3), 32, np.uint8)
    cells = sheet.reshape(-1, side, side, 3)
    for cell, image_id in zip(cells, image_ids, strict=False):
        image = cv2.imread(str(folder / coco.imgs[image_id]['file_name']))
        image = cv2.resize(image, None, fx=zoom, fy=zoom)
        for ann in coco.imgToAnns[image_id]:
            mask = np.kron(coco.annToMask(ann), np.ones((zoom, zoom), np.uint8))
            contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
            colour = COLOURS[ann['category_id'] - 1]
            cv2.drawContours(
                image, contours, -1, (255,) * 3 if ann['iscrowd'] else colour, 1
            )
        cell[: image.shape[0], : image.shape[1]] = image
    return sheet.swapaxes(1, 2).reshape(columns * side, columns * side, 3)


def main():
    args = parse_args()
    try:
        root = make_shapes(**vars(args))
    except (OSError, ValueError) as err:
        sys.exit(str(err))
    cocos = {}
    for split in ('train', 'val'):
        with contextlib.redirect_stdout(io.StringIO()):
            cocos[split] = COCO(root / 'annotations' / f'instances_{split}.json')
        print(summarise(split, cocos[split]))
    preview = root / 'preview.png'
    if cv2.imwrite(str(preview), draw_preview(root / 'train', cocos['train'])):
        print(f'preview: {preview}')


if __name__ == '__main__':
    main()
