"""DINOv2 of the transformers library, with query, key and value apart."""

import torch
from torch import Tensor

from .layout import Layout

QKV = '.attention.attention.{}.'
PARTS = ('query', 'key', 'value')


def _prepare(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join query, key and value."""
    prepared = dict(state_dict)
    for key in state_dict:
        names = [key.replace(QKV.format(PARTS[0]), QKV.format(part)) for part in PARTS]
        if len(set(names)) == len(PARTS) and state_dict.keys() >= set(names):
            joined = torch.cat([prepared.pop(name) for name in names])
            prepared[key.replace(QKV.format(PARTS[0]), '.attn.qkv.')] = joined
    return prepared


DINOV2_TRANSFORMERS = Layout(
    'transformers DINOv2',
    pattern=r'encoder\.layer\.\d+\.attention\.',
    rules=(
        (r'^embeddings\.patch_embeddings\.projection\.', 'patch_embed.projection.'),
        (r'^embeddings\.position_embeddings$', 'pos_embed'),
        (r'^embeddings\.', ''),
        (r'^encoder\.layer\.', 'layers.'),
        (r'^(layers\.\d+)\.norm([12])\.', r'\1.ln\2.'),
        (r'\.attention\.output\.dense\.', '.attn.proj.'),
        (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
        (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
        (r'\.layer_scale1\.lambda1$', '.attn.gamma1.weight'),
        (r'\.layer_scale2\.lambda1$', '.ffn.gamma2.weight'),
        (r'^layernorm\.', 'ln1.'),
    ),
    prepare=_prepare,
)
