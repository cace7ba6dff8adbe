"""Hooks and optimizer constructors."""

from .hooks import KappaWarmupHook
from .optimizers import LayerDecayOptimWrapperConstructor

__all__ = ['KappaWarmupHook', 'LayerDecayOptimWrapperConstructor']
