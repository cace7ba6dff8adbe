"""ViT, DeiT and DINOv2 of the transformers library, with query, key and value apart."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from .renaming import rename

NAME = 'transformers ViT'

RULES = (
    (r'^embeddings\.patch_embeddings\.projection\.', 'patch_embed.projection.'),
    (r'^embeddings\.position_embeddings$', 'pos_embed'),
    (r'^embeddings\.distillation_token$', 'dist_token'),
    (r'^embeddings\.', ''),
    (r'^encoder\.layer\.', 'layers.'),
    (r'^(layers\.\d+)\.(?:norm1|layernorm_before)\.', r'\1.ln1.'),
    (r'^(layers\.\d+)\.(?:norm2|layernorm_after)\.', r'\1.ln2.'),
    (r'\.attention\.output\.dense\.', '.attn.proj.'),
    (r'\.(?:mlp\.fc1|intermediate\.dense)\.', '.ffn.layers.0.0.'),
    (r'\.(?:mlp\.fc2|output\.dense)\.', '.ffn.layers.1.'),
    (r'\.layer_scale1\.lambda1$', '.attn.gamma1.weight'),
    (r'\.layer_scale2\.lambda1$', '.ffn.gamma2.weight'),
    (r'^layernorm\.', 'ln1.'),
)

PARTS = ('query', 'key', 'value')


def matches(keys: Iterable[str]) -> bool:
    """Tell whether keys are those of this layout.

    Args:
        keys (Iterable[str]): Keys of the backbone, without a prefix.

    Returns:
        bool: Whether they are.
    """
    return any(re.match(r'encoder\.layer\.\d+\.attention\.', key) for key in keys)


def convert(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights as mmpretrain's ``VisionTransformer`` does, and join qkv.

    Args:
        state_dict (dict[str, Tensor]): Weights of the backbone.

    Returns:
        dict[str, Tensor]: The weights under new names.
    """
    converted = {}
    for key, value in state_dict.items():
        new = rename(key, RULES)
        part = re.search(r'\.attention\.attention\.(query|key|value)\.', new)
        if part is None:
            converted[new] = value
            continue
        names = [key.replace(f'.{part[1]}.', f'.{name}.') for name in PARTS]
        if part[1] == PARTS[0] and all(name in state_dict for name in names):
            joined = torch.cat([state_dict[name] for name in names])
            converted[new.replace(part[0], '.attn.qkv.')] = joined
    return converted
