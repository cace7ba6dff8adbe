"""Names that files give to the weights of a backbone, one module for each layout."""

from .dinov2_transformers import DINOV2_TRANSFORMERS
from .layout import Layout
from .pvt import PVT
from .swin import SWIN
from .vit import VIT
from .xcit import XCIT

OPENMMLAB = Layout('OpenMMLab', pattern='')
"""The names of mmpretrain and mmdet themselves, which every backbone here has."""

LAYOUTS = (OPENMMLAB, VIT, SWIN, XCIT, PVT, DINOV2_TRANSFORMERS)
"""In order of preference where two fit a backbone equally well."""

__all__ = ['LAYOUTS', 'Layout']
