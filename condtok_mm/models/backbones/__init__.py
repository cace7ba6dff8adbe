"""Backbones whose embedded tokens are conditioned."""

from .swin import CondTokSwinTransformer
from .vit import CondTokViT

__all__ = ['CondTokSwinTransformer', 'CondTokViT']
