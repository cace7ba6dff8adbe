"""Backbones whose embedded tokens are conditioned."""

from .any import CondTok
from .swin import CondTokSwinTransformer
from .vit import CondTokViT
from .xcit import CondTokXCiT

__all__ = ['CondTok', 'CondTokSwinTransformer', 'CondTokViT', 'CondTokXCiT']
