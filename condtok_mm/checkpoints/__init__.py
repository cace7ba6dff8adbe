"""Reading foreign weights: any usual layout, one report, nothing executed."""

from .loading import (
    MIN_MATCHED,
    convert_checkpoint,
    install_checkpoint_reader,
    load_backbone,
)
from .reading import read_checkpoint, use_safe_reader
from .report import LoadReport

__all__ = [
    'MIN_MATCHED',
    'LoadReport',
    'convert_checkpoint',
    'install_checkpoint_reader',
    'load_backbone',
    'read_checkpoint',
    'use_safe_reader',
]
