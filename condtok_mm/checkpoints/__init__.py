"""Reading foreign weights: any usual layout, one report, nothing executed."""

from .loading import MIN_MATCHED, convert_checkpoint, load_backbone, read_any_checkpoint
from .reading import read_checkpoint, use_safe_reader
from .report import LoadReport

__all__ = [
    'MIN_MATCHED',
    'LoadReport',
    'convert_checkpoint',
    'load_backbone',
    'read_any_checkpoint',
    'read_checkpoint',
    'use_safe_reader',
]
