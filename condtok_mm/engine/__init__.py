"""Hooks and optimizer constructors."""

from .hooks import ConditionNumberHook, KappaWarmupHook, RandomStateHook
from .optimizers import LayerDecayOptimWrapperConstructor

__all__ = [
    'ConditionNumberHook',
    'KappaWarmupHook',
    'LayerDecayOptimWrapperConstructor',
    'RandomStateHook',
]
