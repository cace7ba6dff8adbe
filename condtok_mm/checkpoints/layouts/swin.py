"""Swin Transformers of the original repository and of timm.

timm counts a patch merging to the stage that follows, the original to the one before.
Both lay the four merged pixels side by side, rows first; mmdet and mmpretrain lay them
channel by channel, columns first.
"""

import re
from collections.abc import Iterable

from torch import Tensor

from .renaming import rename

NAME = 'original or timm Swin'

RULES = (
    (r'^patch_embed\.proj\.', 'patch_embed.projection.'),
    (r'^layers\.', 'stages.'),
    (r'\.attn\.', '.attn.w_msa.'),
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
    return any(re.match(r'layers\.\d+\.blocks\.\d+\.', key) for key in keys)


def convert(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights as mmdet's ``SwinTransformer`` does, and reorder the merging.

    Args:
        state_dict (dict[str, Tensor]): Weights of the backbone.

    Returns:
        dict[str, Tensor]: The weights under new names.
    """
    stages = [int(found[1]) for key in state_dict if (found := _stage(key))]
    last = max(stages, default=0)
    shift = any(_stage(key, last) and '.downsample.' in key for key in state_dict)
    converted = {}
    for key, value in state_dict.items():
        new = rename(key, RULES)
        if '.downsample.' not in key:
            converted[re.sub(r'^norm\.', f'norm{last}.', new)] = value
            continue
        _, stage, rest = new.split('.', 2)
        converted[f'stages.{int(stage) - shift}.{rest}'] = _reorder(value)
    return converted


def _stage(key: str, number: int | str = r'\d+') -> re.Match | None:
    return re.match(rf'layers\.({number})\.', key)


def _reorder(value: Tensor) -> Tensor:
    """Permute the last axis from pixels (4, C) to channels (C, 4), columns first."""
    pixels = value.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :]
    return pixels.transpose(-1, -2).flatten(-2)
