"""What conditioning does to the tokens of a model."""

from .token_conditioning import TokenReport, measure_tokens, plot_tokens

__all__ = ['TokenReport', 'measure_tokens', 'plot_tokens']
