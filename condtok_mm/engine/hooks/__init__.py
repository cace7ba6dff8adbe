"""Hooks of the training loop."""

from .kappa_warmup_hook import KappaWarmupHook

__all__ = ['KappaWarmupHook']
