"""Swin Transformers of the original repository and of timm.

timm counts a patch merging to the stage that follows, the original to the one before.
Both lay the four merged pixels side by side, rows first; mmdet and mmpretrain lay them
channel by channel, columns first.
"""

import re

from torch import Tensor

from .layout import Layout


def _prepare(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Count patch merging to the stage before, reorder it, and number the last norm."""
    stages = [int(found[1]) for key in state_dict if (found := _stage(key))]
    last = max(stages, default=0)
    shift = any(_stage(key, last) and '.downsample.' in key for key in state_dict)
    prepared = {}
    for key, value in state_dict.items():
        if '.downsample.' not in key:
            prepared[re.sub(r'^norm\.', f'norm{last}.', key)] = value
            continue
        _, stage, rest = key.split('.', 2)
        prepared[f'layers.{int(stage) - shift}.{rest}'] = _reorder(value)
    return prepared


def _stage(key: str, number: int | str = r'\d+') -> re.Match | None:
    return re.match(rf'layers\.({number})\.', key)


def _reorder(value: Tensor) -> Tensor:
    """Permute the last axis from pixels (4, C) to channels (C, 4), columns first."""
    pixels = value.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :]
    return pixels.transpose(-1, -2).flatten(-2)


SWIN = Layout(
    'original or timm Swin',
    # Version 2 has no such table.
    pattern=r'layers\.\d+\.blocks\.\d+\.attn\.relative_position_bias_table$',
    rules=(
        (r'^patch_embed\.proj\.', 'patch_embed.projection.'),
        (r'^layers\.', 'stages.'),
        (r'\.attn\.', '.attn.w_msa.'),
        (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
        (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
    ),
    prepare=_prepare,
)
