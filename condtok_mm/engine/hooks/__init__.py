"""Hooks of the training loop."""

from .condition_number_hook import ConditionNumberHook
from .kappa_warmup_hook import KappaWarmupHook
from .random_state_hook import RandomStateHook

__all__ = ['ConditionNumberHook', 'KappaWarmupHook', 'RandomStateHook']
