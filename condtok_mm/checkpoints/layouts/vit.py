"""Plain vision transformers of timm, DeiT, MAE, DINO, DINOv2 and detectron2.

They share timm's names. DINOv2 nests the blocks in chunks and has layer scale; ViTDet
adds relative positions; what else they add (decoder, mask token, heads) is no part of
a backbone.
"""

from .layout import Layout

VIT = Layout(
    'timm ViT',
    pattern=r'blocks\.(\d+\.)?\d+\.(norm|attn|mlp)',
    rules=(
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
    ),
)
