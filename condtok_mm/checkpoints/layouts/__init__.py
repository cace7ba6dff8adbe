"""Names that files give to the weights of a backbone, one module for each layout.

A layout has a ``NAME``, ``matches(keys)`` and ``convert(state_dict)``, which returns
the same weights under the names of mmpretrain and mmdet.
"""

from . import huggingface, openmmlab, swin, vit, xcit

LAYOUTS = (openmmlab, vit, swin, xcit, huggingface)
"""In order of preference where two fit a backbone equally well."""

__all__ = ['LAYOUTS']
