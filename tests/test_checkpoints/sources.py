"""Models of other libraries with random weights, and their files in every layout."""

import re

import timm
import torch
from mmdet.registry import MODELS

from ..conftest import randomise

VIT = dict(arch='deit-tiny', out_type='featmap', drop_path_rate=0.0)


def build(**cfg):
    backbone = MODELS.build(cfg)
    backbone.eval()
    return backbone


def timm_model(name, **kwargs):
    return randomise(timm.create_model(name, **kwargs)).eval()


def original_swin(state_dict):
    """Patch merging counted to the stage before, and the buffers of the original."""
    renamed = {'layers.0.blocks.1.attn_mask': torch.zeros(4, 49, 49)}
    for key, value in state_dict.items():
        stage = re.match(r'layers\.(\d+)\.downsample', key)
        before = f'layers.{int(stage[1]) - 1}.downsample' if stage else ''
        name = key.replace(stage[0], before) if stage else key
        renamed[name.replace('head.fc.', 'head.')] = value
        if name.endswith('bias_table'):
            index = name.replace('bias_table', 'index')
            renamed[index] = torch.zeros(49, 49, dtype=torch.long)
    return renamed


def original_xcit(state_dict):
    """One projection for query, key and value of class attention, and old names."""
    renamed = {}
    for key, value in state_dict.items():
        if match := re.match(r'(cls_attn_blocks\..*\.attn\.)[qkv]\.(.*)', key):
            renamed.setdefault(f'{match[1]}qkv.{match[2]}', []).append(value)
        else:
            renamed[key.replace('pos_embed.', 'pos_embeder.')] = [value]
    return {key: torch.cat(v) if len(v) > 1 else v[0] for key, v in renamed.items()}


def chunked(state_dict, size=3):
    """DINOv2's blocks in chunks; the index inside a chunk is that of the block."""

    def nest(match):
        return f'blocks.{int(match[1]) // size}.{match[1]}.'

    return {
        re.sub(r'^blocks\.(\d+)\.', nest, key): value
        for key, value in state_dict.items()
    }


def mae(state_dict):
    """MAE's encoder with its mask token and decoder, without a head."""
    kept = {key: v for key, v in state_dict.items() if not key.startswith('head.')}
    decoder = {
        f'decoder_blocks.{key[len("blocks.") :]}': value
        for key, value in state_dict.items()
        if key.startswith('blocks.0.')
    }
    return kept | decoder | dict(mask_token=torch.zeros(1, 1, 192))


def transformers_dinov2(state_dict):
    """transformers' names of DINOv2, with query, key and value apart."""
    rules = (
        ('patch_embed.proj.', 'embeddings.patch_embeddings.projection.'),
        ('pos_embed', 'embeddings.position_embeddings'),
        ('cls_token', 'embeddings.cls_token'),
        ('blocks.', 'encoder.layer.'),
        ('.attn.proj.', '.attention.output.dense.'),
        ('.ls1.gamma', '.layer_scale1.lambda1'),
        ('.ls2.gamma', '.layer_scale2.lambda1'),
    )
    renamed = {}
    for key, value in state_dict.items():
        name = re.sub(r'^norm\.', 'layernorm.', key)
        for old, new in rules:
            name = name.replace(old, new)
        parts = {name: value}
        if '.attn.qkv.' in name:
            parts = {
                name.replace('.attn.qkv.', f'.attention.attention.{part}.'): rows
                for part, rows in zip(
                    ('query', 'key', 'value'), value.chunk(3), strict=True
                )
            }
        renamed |= parts
    return renamed


def vitdet(state_dict):
    """detectron2's ViTDet from our own keys: another prefix, a pyramid behind."""
    rules = (
        ('patch_embed.projection.', 'patch_embed.proj.'),
        ('layers.', 'blocks.'),
        ('.ln1.', '.norm1.'),
        ('.ln2.', '.norm2.'),
        ('.ffn.blocks.0.0.', '.mlp.fc1.'),
        ('.ffn.blocks.1.', '.mlp.fc2.'),
    )
    renamed = {'backbone.simfp_2.0.weight': torch.zeros(192, 96, 2, 2)}
    for key, value in state_dict.items():
        name = key
        for old, new in rules:
            name = name.replace(old, new)
        renamed[f'backbone.net.{name}'] = value
    return renamed


def wrapped(state_dict):
    """The same weights as different trainers save them."""
    prefixed = {
        prefix: {prefix + key: value for key, value in state_dict.items()}
        for prefix in ('module.', 'backbone.', 'module.backbone.', 'model.encoder.')
    }
    return {
        'bare': state_dict,
        'model': dict(model=state_dict, epoch=3),
        'state_dict': dict(state_dict=state_dict, meta=dict(epoch=1)),
        'ddp': dict(state_dict=prefixed['module.']),
        'detector': dict(
            state_dict=prefixed['backbone.'] | {'neck.weight': torch.zeros(2)}
        ),
        'ddp of a classifier': dict(model=prefixed['module.backbone.']),
        'other names': prefixed['model.encoder.'],
        'averaged': dict(
            state_dict={key: value * 0 for key, value in state_dict.items()},
            state_dict_ema=state_dict,
        ),
        'dino': dict(
            teacher=prefixed['module.backbone.'],
            student={k: v * 0 for k, v in prefixed['module.backbone.'].items()},
        ),
    }


def pvt(embed_dims=8, depths=(1, 2, 1, 1), ratios=(8, 4, 2, 1)):
    """Random weights under the names of the original PVT."""
    shapes, channels, side = {}, 3, 56
    for stage, (depth, ratio) in enumerate(zip(depths, ratios, strict=True), 1):
        width, patch = embed_dims * 2 ** (stage - 1), 4 if stage == 1 else 2
        shapes[f'patch_embed{stage}.proj.weight'] = (width, channels, patch, patch)
        tokens = side**2 + (stage == len(depths))
        shapes[f'pos_embed{stage}'] = (1, tokens, width)
        norms = [f'patch_embed{stage}.norm']
        for layer in range(depth):
            block = f'block{stage}.{layer}'
            norms += [f'{block}.norm1', f'{block}.norm2']
            shapes[f'{block}.attn.q.weight'] = (width, width)
            shapes[f'{block}.attn.kv.weight'] = (2 * width, width)
            shapes[f'{block}.attn.proj.weight'] = (width, width)
            shapes[f'{block}.mlp.fc1.weight'] = (4 * width, width)
            shapes[f'{block}.mlp.fc2.weight'] = (width, 4 * width)
            if ratio > 1:
                shapes[f'{block}.attn.sr.weight'] = (width, width, ratio, ratio)
                norms.append(f'{block}.attn.norm')
        shapes |= {f'{norm}.weight': (width,) for norm in norms}
        channels, side = width, side // 2
    for key in list(shapes):
        if key.endswith('.weight'):
            shapes[key.replace('.weight', '.bias')] = shapes[key][:1]
    return {key: torch.randn(shape) for key, shape in shapes.items()}
