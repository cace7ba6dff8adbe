"""XCiT of the original repository and of timm.

The original has one projection for query, key and value of class attention, timm three;
its detectors call the levels behind the blocks fpn1 to fpn4.
"""

from torch import Tensor

from .layout import Layout


def _prepare(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split the projections of class attention."""
    prepared = {}
    for key, value in state_dict.items():
        if key.startswith('cls_attn_blocks.') and '.attn.qkv.' in key:
            for part, rows in zip('qkv', value.chunk(3), strict=True):
                prepared[key.replace('.qkv.', f'.{part}.')] = rows
        else:
            prepared[key] = value
    return prepared


XCIT = Layout(
    'original or timm XCiT',
    pattern=r'blocks\.\d+\.local_mp\.',
    rules=(
        # Every other module of the stem is an activation, which mmcv puts into the
        # layer before.
        *(
            (rf'^patch_embed\.proj\.{2 * layer}\.', f'patch_embed.proj.{layer}.')
            for layer in range(4)
        ),
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
    ),
    prepare=_prepare,
)
