"""Optimizer constructors."""

from .optimizers import LayerDecayOptimWrapperConstructor

__all__ = ['LayerDecayOptimWrapperConstructor']
