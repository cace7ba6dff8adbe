"""Cut the objects of a COCO data set out of its images, to train a classifier on.

Writes OUT/train/CATEGORY/ID.png and OUT/val/CATEGORY/ID.png, folders as mmpretrain's
CustomDataset reads them, from ROOT/annotations/instances_SPLIT.json and ROOT/SPLIT.
Crowd regions are left out.
"""

import argparse
import contextlib
import io
import shutil
import sys
from pathlib import Path

import cv2
from pycocotools.coco import COCO
from rich.progress import track


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('root', help='folder of the data set')
    parser.add_argument('out', help='folder to make')
    args = parser.parse_args()
    root, out = Path(args.root), Path(args.out)
    if out.exists():
        sys.exit(f'{out} exists already; name another folder, or remove it.')
    partial = out.with_name(f'{out.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    for split in ('train', 'val'):
        path = root / 'annotations' / f'instances_{split}.json'
        if not path.is_file():
            sys.exit(f'{path} does not exist; {root} is not laid out as expected.')
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(path)
        count = crop(coco, root / split, partial / split)
        print(f'{split}: {count} crops of {len(coco.cats)} categories in {out / split}')
    partial.rename(out)


def crop(coco: COCO, images: Path, out: Path) -> int:
    """Write the crops of one split and count them."""
    count = 0
    for image_id in track(sorted(coco.imgs), description=f'cropping {images.name}'):
        path = images / coco.imgs[image_id]['file_name']
        image = cv2.imread(str(path))
        if image is None:
            sys.exit(f'image {path} is missing or cannot be read.')
        for ann in coco.imgToAnns[image_id]:
            left, top, width, height = map(int, ann['bbox'])
            part = image[max(top, 0) : top + height, max(left, 0) : left + width]
            if ann['iscrowd'] or not part.size:
                continue
            folder = out / coco.cats[ann['category_id']]['name']
            folder.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / f'{ann["id"]}.png'), part)
            count += 1
    return count


if __name__ == '__main__':
    main()
