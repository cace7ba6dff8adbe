"""Exit with 0 if the OpenMMLab stack is complete and mmcv's operators run here."""

import mmpretrain.models  # noqa: F401
import torch
from mmcv.ops import nms

import condtok_mm  # noqa: F401

BOXES = [[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]]


def main() -> None:
    for device in ('cpu', *(['cuda'] if torch.cuda.is_available() else [])):
        boxes = torch.tensor(BOXES, device=device)
        scores = torch.tensor([0.9, 0.8, 0.7], device=device)
        kept = nms(boxes, scores, iou_threshold=0.5)[1].tolist()
        if kept != [0, 2]:
            raise RuntimeError(f'nms on {device} kept boxes {kept} instead of [0, 2].')
        print(f'mmcv operators run on {device}')


if __name__ == '__main__':
    main()
