"""Conditioned embedded tokens for detectors of the OpenMMLab stack.

Importing the package registers its backbones, necks, hooks and optimizer constructors.
Where none of mmengine, mmcv and mmdet is installed, only ``condtok_mm.conditioning``
works.

Attributes:
    CONFIGS (str): Folder of the configs, to inherit from anywhere:
        ``_base_ = __import__('condtok_mm').CONFIGS + '/mask_rcnn/....py'``.
"""

from pathlib import Path

from ._stack import check_ops, check_stack, has_openmmlab

__version__ = '0.1.0'

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / '.mim' / 'configs'
CONFIGS = str(_INSTALLED if _INSTALLED.is_dir() else _HERE.parent / 'configs')

if has_openmmlab():
    check_stack()
    check_ops()
    from . import engine, models

__all__ = ['CONFIGS', '__version__', 'engine', 'models']
