"""Plain vision transformers of timm, DeiT, MAE, DINO, DINOv2 and detectron2.

They share timm's names. DINOv2 nests the blocks in chunks and has layer scale; ViTDet
adds relative positions; what else they add (decoder, mask token, heads) is no part of
a backbone.
"""

import re
from collections.abc import Iterable

from torch import Tensor

from .renaming import rename

NAME = 'timm ViT'

RULES = (
    (r'^patch_embed\.proj\.', 'patch_embed.projection.'),
    (r'^blocks\.(?:\d+\.)?(\d+)\.', r'layers.\1.'),
    (r'^(layers\.\d+)\.norm([12])\.', r'\1.ln\2.'),
    (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
    (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
    (r'\.mlp\.(w12|w3)\.', r'.ffn.\1.'),
    (r'\.ls1\.gamma$|\.gamma_1$', '.attn.gamma1.weight'),
    (r'\.ls2\.gamma$|\.gamma_2$', '.ffn.gamma2.weight'),
    (r'^norm_pre\.', 'pre_norm.'),
    (r'^norm\.', 'ln1.'),
    (r'^fc_norm\.', 'ln2.'),
)


def matches(keys: Iterable[str]) -> bool:
    """Tell whether keys are those of this layout.

    Args:
        keys (Iterable[str]): Keys of the backbone, without a prefix.

    Returns:
        bool: Whether they are.
    """
    return any(re.match(r'blocks\.(\d+\.)?\d+\.(norm|attn|mlp)', key) for key in keys)


def convert(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights as mmpretrain's ``VisionTransformer`` does.

    Args:
        state_dict (dict[str, Tensor]): Weights of the backbone.

    Returns:
        dict[str, Tensor]: The same weights under new names.
    """
    return {rename(key, RULES): value for key, value in state_dict.items()}
