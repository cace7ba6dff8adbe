"""XCiT of the original repository and of timm.

The original has one projection for query, key and value of class attention, timm three;
its detectors call the levels behind the blocks fpn1 to fpn4.
"""

from collections.abc import Iterable

from torch import Tensor

from .renaming import rename

NAME = 'original or timm XCiT'

RULES = (
    # Every other module of the stem is an activation, which mmcv puts into the layer.
    *((rf'^patch_embed\.proj\.{2 * i}\.', f'patch_embed.proj.{i}.') for i in range(4)),
    (r'^patch_embed\.proj\.(\d+)\.0\.', r'patch_embed.proj.\1.conv.'),
    (r'^patch_embed\.proj\.(\d+)\.1\.', r'patch_embed.proj.\1.bn.'),
    (r'^pos_embed(er)?\.token_projection\.', 'pos_embed.token_projection.conv.'),
    (r'^fpn1\.', 'levels.0.'),
    (r'^fpn2\.', 'levels.1.'),
    (r'^cls_attn_blocks\.', 'ca_layers.'),
    (r'^blocks\.', 'xca_layers.'),
    (r'\.local_mp\.conv(\d)\.', r'.local_mp.conv\1.conv.'),
    (r'\.local_mp\.bn\.', '.local_mp.conv1.bn.'),
    (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
    (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
)


def matches(keys: Iterable[str]) -> bool:
    """Tell whether keys are those of this layout.

    Args:
        keys (Iterable[str]): Keys of the backbone, without a prefix.

    Returns:
        bool: Whether they are.
    """
    return any(key.startswith('blocks.') and '.local_mp.' in key for key in keys)


def convert(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights as mmpretrain's ``XCiT`` does.

    Args:
        state_dict (dict[str, Tensor]): Weights of the backbone.

    Returns:
        dict[str, Tensor]: The weights under new names.
    """
    converted = {}
    for key, value in state_dict.items():
        new = rename(key, RULES)
        if new.startswith('ca_layers.') and '.attn.qkv.' in new:
            for part, rows in zip('qkv', value.chunk(3), strict=True):
                converted[new.replace('.qkv.', f'.{part}.')] = rows
        else:
            converted[new] = value
    return converted
