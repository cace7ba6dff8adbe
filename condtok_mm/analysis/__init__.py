"""What conditioning does to the tokens of a model."""

from .token_conditioning import TokenReport, measure_tokens, plot_tokens
from .wrapped_backbones import WrappedReport, measure_wrapped

__all__ = [
    'TokenReport',
    'WrappedReport',
    'measure_tokens',
    'measure_wrapped',
    'plot_tokens',
]
