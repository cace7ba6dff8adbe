"""Conditioned backbones, and the neck for plain vision transformers."""

from .backbones import CondTok, CondTokSwinTransformer, CondTokViT, CondTokXCiT
from .necks import SimpleFPN

__all__ = [
    'CondTok',
    'CondTokSwinTransformer',
    'CondTokViT',
    'CondTokXCiT',
    'SimpleFPN',
]
