"""Optimizer constructors, and the depths that they go by."""

from .layer_decay import LayerDecayOptimWrapperConstructor
from .layer_depth import layer_depths

__all__ = ['LayerDecayOptimWrapperConstructor', 'layer_depths']
