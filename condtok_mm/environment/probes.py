"""Import and run each part of the stack, in a process that may die of it.

A script: it takes the seconds that a step may last and the names of the steps, and
writes a line of JSON for each step that it survives. Importing it needs nothing.
"""

import faulthandler
import json
import os
import re
import sys
import zipfile
from pathlib import Path

NEEDS = {
    'numpy': (),
    'torch': ('numpy',),
    'torchvision': ('torch',),
    'cuda': ('torch',),
    'opencv': ('numpy',),
    'pycocotools': ('numpy',),
    'mmengine': ('torch', 'torchvision', 'opencv'),
    'mmcv': ('mmengine',),
    'mmcv.ops': ('mmcv',),
    'mmcv.ops on cuda': ('mmcv.ops', 'cuda'),
    'mmdet': ('mmcv.ops', 'pycocotools'),
    'mmpretrain': ('mmcv.ops',),
    'condtok_mm': ('mmdet', 'mmpretrain'),
}
"""Step to the earlier steps without which it fails."""

CHECKPOINT = 'checkpoint '
"""What the name of a step begins with that reads a file."""

BOXES = [[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]]
SCORES = [0.9, 0.8, 0.7]
KEPT = [0, 2]


def _numpy() -> dict:
    import numpy

    return dict(version=numpy.__version__)


def _torch() -> dict:
    import torch

    torch.zeros(1).numpy()
    return dict(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=torch.backends.cudnn.version(),
        cxx11_abi=torch.compiled_with_cxx11_abi(),
    )


def _torchvision() -> dict:
    import torch
    import torchvision

    kept = torchvision.ops.nms(torch.tensor(BOXES), torch.tensor(SCORES), 0.5)
    _compare(kept.tolist(), 'cpu')
    cuda = getattr(torchvision.version, 'cuda', None)
    return dict(
        version=torchvision.__version__,
        cuda=cuda and f'{cuda // 1000}.{cuda % 1000 // 10}',
    )


def _cuda() -> dict:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = dict(
            name=torch.cuda.get_device_name(index),
            capability=list(torch.cuda.get_device_capability(index)),
        )
        try:
            torch.ones(8, 8, device=f'cuda:{index}').square().sum().item()
        except RuntimeError as error:
            gpu['error'] = _first_line(error)
        gpus.append(gpu)
    found = dict(gpus=gpus, archs=torch.cuda.get_arch_list())
    errors = [f'{gpu["name"]}: {gpu["error"]}' for gpu in gpus if 'error' in gpu]
    return found | dict(error=errors[0]) if errors else found


def _opencv() -> dict:
    import cv2
    import numpy

    cv2.resize(numpy.zeros((4, 4, 3), numpy.uint8), (2, 2))
    return dict(version=cv2.__version__)


def _pycocotools() -> dict:
    import numpy
    from pycocotools import mask

    mask.encode(numpy.ones((2, 2), numpy.uint8, order='F'))
    return {}


def _mmengine() -> dict:
    import mmengine.runner

    return dict(version=mmengine.__version__)


def _mmcv() -> dict:
    import mmcv

    return dict(version=mmcv.__version__)


def _mmcv_ops() -> dict:
    from mmcv.ops import get_compiler_version, get_compiling_cuda_version

    _nms('cpu')
    return dict(cuda=get_compiling_cuda_version(), compiler=get_compiler_version())


def _mmcv_ops_on_cuda() -> dict:
    import torch

    for index in range(torch.cuda.device_count()):
        _nms(f'cuda:{index}')
    return dict(count=torch.cuda.device_count())


def _mmdet() -> dict:
    import mmdet.models

    return dict(version=mmdet.__version__)


def _mmpretrain() -> dict:
    import mmpretrain.models

    return dict(version=mmpretrain.__version__)


def _condtok_mm() -> dict:
    import condtok_mm

    return dict(version=condtok_mm.__version__)


def _checkpoint(path: str) -> dict:
    """Read a checkpoint as stock torch would, and as this project does."""
    import torch

    from condtok_mm.checkpoints import read_checkpoint
    from condtok_mm.checkpoints.reading import rewrite_command

    needs = None
    if Path(path).is_file() and not path.endswith('.safetensors'):
        # Of its own allowances torch 2.4 keeps those of the file before.
        torch.serialization.clear_safe_globals()
        try:
            torch.load(path, map_location='cpu', weights_only=True)
        except Exception as error:
            needs = re.search(r'GLOBAL (\S+)|$', str(error))[1] or _first_line(error)
    checkpoint = read_checkpoint(path)
    meta = checkpoint.get('meta')
    meta = meta if isinstance(meta, dict) else {}
    writers = {
        name.removesuffix('_version'): str(value)
        for name, value in meta.items()
        if str(name).endswith('_version')
    }
    if found := re.search(r'^PyTorch: *(\S+)', str(meta.get('env_info')), re.M):
        writers['torch'] = found[1]
    elif not path.endswith('.safetensors') and not zipfile.is_zipfile(path):
        writers['torch'] = 'before 1.6, by its file format'
    load = (
        'from condtok_mm.checkpoints import read_checkpoint; '
        f'c = read_checkpoint({json.dumps(path)})'
    )
    return dict(needs=needs, writers=writers, rewrite=rewrite_command(path, load))


def _nms(device: str) -> None:
    import torch
    from mmcv.ops import nms

    boxes = torch.tensor(BOXES, device=device)
    scores = torch.tensor(SCORES, device=device)
    _compare(nms(boxes, scores, iou_threshold=0.5)[1].tolist(), device)


def _compare(kept: list[int], device: str) -> None:
    if kept != KEPT:
        raise RuntimeError(f'nms on {device} kept boxes {kept} instead of {KEPT}')


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ['']
    return f'{type(error).__name__}: {lines[0]}'.removesuffix(': ')


STEPS = {
    'numpy': _numpy,
    'torch': _torch,
    'torchvision': _torchvision,
    'cuda': _cuda,
    'opencv': _opencv,
    'pycocotools': _pycocotools,
    'mmengine': _mmengine,
    'mmcv': _mmcv,
    'mmcv.ops': _mmcv_ops,
    'mmcv.ops on cuda': _mmcv_ops_on_cuda,
    'mmdet': _mmdet,
    'mmpretrain': _mmpretrain,
    'condtok_mm': _condtok_mm,
}


def _run(name: str) -> dict:
    try:
        if name.startswith(CHECKPOINT):
            return _checkpoint(name.removeprefix(CHECKPOINT))
        return STEPS[name]()
    except BaseException as error:
        return dict(error=_first_line(error))


def main() -> None:
    """Run the steps that the command line names."""
    results = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or '.').resolve() != here]
    timeout, *names = sys.argv[1:]
    for name in names:
        faulthandler.dump_traceback_later(float(timeout), exit=True)
        outcome = _run(name)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([name, outcome]), file=results, flush=True)


if __name__ == '__main__':
    main()
