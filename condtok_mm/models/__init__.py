"""Conditioned backbones, and the neck for plain vision transformers."""

from .backbones import CondTokSwinTransformer, CondTokViT
from .necks import SimpleFPN

__all__ = ['CondTokSwinTransformer', 'CondTokViT', 'SimpleFPN']
