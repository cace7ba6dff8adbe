from itertools import pairwise

import mmdet.models
import mmpretrain.models
import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from torch import nn

from condtok_mm.engine.optimizers import layer_depths
from condtok_mm.engine.optimizers.layer_depth import structural_depths
from condtok_mm.models import (
    CondTokSwinTransformer,
    CondTokViT,
    CondTokXCiT,
    SimpleFPN,
)

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = CondTokViT(ARCH, img_size=32, patch_size=8, use_rel_pos=True)
        self.neck = SimpleFPN(16, out_channels=8)


def build(model, **paramwise):
    return build_optim_wrapper(
        model,
        dict(
            type='OptimWrapper',
            constructor='LayerDecayOptimWrapperConstructor',
            paramwise_cfg=paramwise,
            optimizer=dict(type='AdamW', lr=1e-2, weight_decay=0.1),
        ),
    )


def test_rates_and_decay_of_every_parameter():
    model = Detector()
    wrapper = build(
        model,
        decay_rate=0.5,
        norm_decay_mult=0.0,
        custom_keys={'pos_embed': dict(decay_mult=0.0), 'proj.': dict(lr_mult=2.0)},
    )
    groups = {
        id(parameter): group
        for group in wrapper.optimizer.param_groups
        for parameter in group['params']
    }
    assert len(groups) == len(list(model.parameters()))
    assert len(wrapper.optimizer.param_groups) < 12
    expected = {
        'backbone.pos_embed': (1e-2 * 0.5**3, 0.0),
        'backbone.patch_embed.projection.weight': (1e-2 * 0.5**3, 0.1),
        'backbone.layers.0.attn.qkv.weight': (1e-2 * 0.5**2, 0.1),
        'backbone.layers.0.attn.proj.weight': (2e-2 * 0.5**2, 0.1),
        'backbone.layers.0.ln1.weight': (1e-2 * 0.5**2, 0.0),
        'backbone.layers.1.ffn.layers.1.bias': (1e-2 * 0.5, 0.1),
        'neck.convs.0.0.conv.weight': (1e-2, 0.1),
    }
    parameters = dict(model.named_parameters())
    for name, (rate, decay) in expected.items():
        group = groups[id(parameters[name])]
        assert group['lr'] == pytest.approx(rate), name
        assert group['weight_decay'] == decay, name


def test_frozen_parameters_are_left_out():
    model = Detector()
    model.backbone.patch_embed.requires_grad_(False)
    wrapper = build(model, decay_rate=0.7)
    optimized = {
        id(p) for group in wrapper.optimizer.param_groups for p in group['params']
    }
    assert optimized == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize('rate', [None, 0, 1.5, 'high', True])
def test_bad_rate_is_named(rate):
    with pytest.raises((TypeError, ValueError), match=rf'decay_rate must .*{rate}'):
        build(Detector(), decay_rate=rate)


def test_optimizers_without_weight_decay_or_rate():
    cfg = dict(
        constructor='LayerDecayOptimWrapperConstructor',
        paramwise_cfg=dict(decay_rate=0.5),
    )
    wrapper = build_optim_wrapper(
        Detector(), dict(cfg, optimizer=dict(type='SGD', lr=0.1))
    )
    rates = {round(group['lr'], 6) for group in wrapper.optimizer.param_groups}
    assert rates == {0.1, 0.05, 0.025, 0.0125}
    with pytest.raises(ValueError, match=r'optimizer\.lr, which is missing'):
        build_optim_wrapper(Detector(), dict(cfg, optimizer=dict(type='AdamW')))


def plain(**kwargs):
    arch = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32)
    return dict(arch=dict(arch, **kwargs), img_size=32)


def staged(**kwargs):
    arch = dict(embed_dims=12, depths=[2, 1, 2, 1], num_heads=[1, 1, 1, 1])
    return dict(arch=arch, **kwargs)


def twins(**kwargs):
    ones = [1, 1, 1, 1]
    arch = dict(embed_dims=[8, 8, 8, 8], depths=[2, 1, 2, 1], num_heads=ones)
    strides = [4, 2, 2, 2]
    arch.update(patch_sizes=strides, strides=strides, mlp_ratios=ones, **kwargs)
    return dict(arch=dict(arch, sr_ratios=[8, 4, 2, 1]))


def build_stock(name, **kwargs):
    package = mmdet if name.startswith('mmdet.') else mmpretrain
    with DefaultScope.overwrite_default_scope(package.__name__):
        return getattr(package.models, name.removeprefix('mmdet.'))(**kwargs)


TELLING = {
    'VisionTransformer': plain(),
    'BEiTViT': plain(),
    'ViTSAM': dict(plain(global_attn_indexes=[1]), out_channels=8, use_rel_pos=True),
    'ViTEVA02': plain(),
    'SwinTransformer': staged(img_size=64),
    'MixMIMTransformer': staged(img_size=64, window_size=[2, 2, 2, 2]),
}
"""Backbones with a get_layer_depth that knows each of their blocks."""
UNLIKE = {'MixMIMTransformer': {'norm.weight': (7, 6), 'norm.bias': (7, 6)}}
"""What the structure tells, and what get_layer_depth does, where they differ."""


@pytest.mark.parametrize('name', TELLING)
def test_structure_agrees_with_what_the_backbone_tells(name):
    backbone = build_stock(name, **TELLING[name])
    told, count = layer_depths(backbone)
    found, found_count = structural_depths(backbone)
    assert list(found) == [name for name, _ in backbone.named_parameters()]
    assert count == found_count
    for parameter in found:
        depth = backbone.get_layer_depth(f'backbone.{parameter}', 'backbone.')
        assert (told[parameter], count) == depth
    unlike = {p: (found[p], told[p]) for p in found if found[p] != told[p]}
    assert unlike == UNLIKE.get(name, {})


def test_convnext_tells_other_steps_in_the_same_order():
    depths = [1, 2, 3, 1]
    arch = dict(depths=depths, channels=[8, 8, 8, 8])
    backbone = build_stock('ConvNeXt', arch=arch)
    found, count = structural_depths(backbone)
    told, told_count = layer_depths(backbone)
    assert (count, told_count) == (9, 8)
    firsts = [found[f'stages.{stage}.0.norm.weight'] for stage in range(4)]
    assert firsts == [1, 2, 4, 7]
    for stage, first in enumerate(firsts):
        assert found[f'downsample_layers.{stage}.0.weight'] == first - 1
    blocks = [name for name in found if name.startswith('stages.')]
    for one, other in pairwise(blocks):
        assert found[one] <= found[other]
        assert told[one] <= told[other]


CASES = {
    'mmdet.SwinTransformer': (
        dict(embed_dims=12, depths=[2, 1, 2, 1], num_heads=[1, 1, 1, 1]),
        8,
        {
            'patch_embed.projection.weight': 0,
            'stages.0.blocks.1.norm1.weight': 2,
            'stages.0.downsample.reduction.weight': 2,
            'stages.1.blocks.0.attn.w_msa.qkv.weight': 3,
            'stages.2.blocks.0.ffn.layers.1.weight': 4,
            'stages.3.blocks.0.norm1.weight': 6,
            'norm0.weight': 7,
            'norm3.weight': 7,
        },
    ),
    'SwinTransformerV2': (
        dict(arch=dict(staged()['arch'], extra_norm_every_n_blocks=0)),
        8,
        {
            'patch_embed.norm.weight': 0,
            'stages.0.blocks.1.attn.w_msa.logit_scale': 2,
            'stages.1.downsample.reduction.weight': 2,
            'stages.1.blocks.0.attn.w_msa.qkv.weight': 3,
            'stages.3.blocks.0.norm1.weight': 6,
            'norm3.weight': 7,
        },
    ),
    'DaViT': (
        staged(),
        8,
        {
            'patch_embed.projection.weight': 0,
            'stages.0.blocks.0.spatial_block.attn.w_msa.qkv.weight': 1,
            'stages.0.blocks.0.channel_block.cpe1.proj.weight': 1,
            'stages.0.downsample.projection.weight': 2,
            'stages.1.blocks.0.spatial_block.norm1.weight': 3,
            'norm3.weight': 7,
        },
    ),
    'MViT': (
        dict(
            arch=dict(
                embed_dims=12, num_layers=3, num_heads=1, downscale_indices=[1, 2]
            )
        ),
        5,
        {
            'patch_embed.projection.weight': 0,
            'blocks.0.attn.rel_pos_h': 1,
            'blocks.1.proj.weight': 2,
            'blocks.2.mlp.fc2.weight': 3,
            'norm2.weight': 4,
        },
    ),
    'mmdet.PyramidVisionTransformer': (
        dict(embed_dims=8, num_layers=[2, 1, 1, 1]),
        7,
        {
            'layers.0.0.projection.weight': 0,
            'layers.0.1.0.pos_embed': 0,
            'layers.0.1.1.attn.attn.in_proj_weight': 1,
            'layers.0.1.2.ffn.layers.0.weight': 2,
            'layers.1.0.projection.weight': 2,
            'layers.1.1.1.norm1.weight': 3,
            'layers.3.1.1.norm2.bias': 5,
        },
    ),
    'mmdet.PyramidVisionTransformerV2': (
        dict(embed_dims=8, num_layers=[2, 1, 1, 1]),
        7,
        {
            'layers.0.0.projection.weight': 0,
            'layers.0.1.0.ffn.layers.1.weight': 1,
            'layers.0.2.weight': 2,
            'layers.1.0.projection.weight': 2,
            'layers.1.1.0.norm1.weight': 3,
            'layers.3.2.weight': 6,
        },
    ),
    'PCPVT': (
        twins(),
        8,
        {
            'patch_embeds.0.projection.weight': 0,
            'position_encodings.0.proj.weight': 0,
            'stages.0.1.attn.q.weight': 2,
            'patch_embeds.1.projection.weight': 2,
            'position_encodings.1.proj.weight': 2,
            'stages.1.0.norm1.weight': 3,
            'patch_embeds.3.projection.weight': 5,
            'stages.3.0.norm2.weight': 6,
        },
    ),
    'SVT': (
        twins(window_sizes=[7, 7, 7, 7]),
        8,
        {
            'patch_embeds.2.projection.weight': 3,
            'stages.2.1.attn.q.weight': 5,
            'position_encodings.3.proj.weight': 5,
        },
    ),
    'XCiT': (
        dict(patch_size=16, embed_dims=32, depth=4, num_heads=2, tokens_norm=True),
        8,
        {
            'cls_token': 0,
            'patch_embed.proj.3.bn.weight': 0,
            'pos_embed.token_projection.conv.weight': 0,
            'xca_layers.0.gamma1': 1,
            'xca_layers.3.local_mp.conv2.conv.weight': 4,
            'ca_layers.0.attn.q.weight': 5,
            'ca_layers.1.ffn.layers.1.weight': 6,
            'norm.weight': 7,
        },
    ),
    'HiViT': (
        dict(arch=dict(embed_dims=64, depths=[1, 1, 2], num_heads=2)),
        8,
        {
            'pos_embed': 0,
            'patch_embed.proj.weight': 0,
            'blocks.1.mlp.fc1.weight': 2,
            'blocks.2.reduction.weight': 2,
            'blocks.3.mlp.fc1.weight': 3,
            'blocks.7.attn.qkv.weight': 6,
        },
    ),
    'mmdet.ResNet': (
        dict(depth=18),
        10,
        {
            'conv1.weight': 0,
            'layer1.0.conv1.weight': 1,
            'layer2.0.downsample.0.weight': 3,
            'layer4.1.bn2.weight': 8,
        },
    ),
}
"""Arguments, number of depths, and depths of some parameters."""


@pytest.mark.parametrize('name', CASES)
def test_depths_of_other_backbones(name):
    arguments, count, expected = CASES[name]
    depths, found_count = layer_depths(build_stock(name, **arguments))
    assert found_count == count
    assert {name: depths[name] for name in expected} == expected
    assert set(depths.values()) | {count - 1} == set(range(count))


def test_conditioned_classes_have_the_depths_of_the_stock_ones():
    swin = CASES['mmdet.SwinTransformer'][0]
    stock = build_stock('mmdet.SwinTransformer', **swin)
    conditioned = CondTokSwinTransformer(**swin, conditioner=dict())
    assert layer_depths(conditioned) == layer_depths(stock)

    arch = dict(embed_dims=32, depth=4, num_heads=2, layer_scale_init_value=1.0)
    stock = build_stock('XCiT', patch_size=16, **arch)
    conditioned = CondTokXCiT(arch, out_indices=(0, 1, 2, 3), conditioner=dict())
    expected, count = layer_depths(stock)
    depths, conditioned_count = layer_depths(conditioned)
    # Two blocks of class attention are not trained, and no depths of their own.
    assert conditioned_count == count - 2
    behind = {name for name in depths if name.startswith(('levels.', 'ca_', 'norm.'))}
    assert {depths.pop(name) for name in behind} == {conditioned_count - 1}
    assert depths == {name: expected[name] for name in depths}


def settings(model, wrapper):
    """Learning rate and weight decay by the name of the parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group['lr'], group['weight_decay'])
        for group in wrapper.optimizer.param_groups
        for parameter in group['params']
    }


class SwinDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = CondTokSwinTransformer(
            **CASES['mmdet.SwinTransformer'][0], conditioner=dict()
        )
        self.neck = nn.Sequential(nn.Conv2d(12, 12, 3, groups=12), nn.BatchNorm2d(12))


def test_rules_are_those_of_mmengine_but_for_the_decay():
    model = SwinDetector()
    model.backbone.stages[0].blocks[0].requires_grad_(False)
    paramwise = dict(
        norm_decay_mult=0.25,
        bias_decay_mult=0.5,
        bias_lr_mult=2.0,
        dwconv_decay_mult=0.125,
        flat_decay_mult=0.0,
    )
    cfg = dict(
        paramwise_cfg=paramwise,
        optimizer=dict(type='AdamW', lr=1e-2, weight_decay=0.1),
    )
    stock = settings(model, build_optim_wrapper(model, cfg))
    decayed = settings(model, build(model, decay_rate=0.5, **paramwise))
    depths, count = layer_depths(model.backbone)
    assert decayed.keys() == stock.keys()
    for name, (rate, decay) in stock.items():
        depth = depths.get(name.removeprefix('backbone.'), count - 1)
        assert decayed[name] == (rate * 0.5 ** (count - 1 - depth), decay), name
    assert len({decay for _, decay in stock.values()}) == 4


def test_custom_keys_replace_only_what_they_set():
    model = SwinDetector()
    found = settings(
        model,
        build(
            model,
            decay_rate=1,
            norm_decay_mult=0.0,
            bias_decay_mult=0.0,
            bias_lr_mult=2.0,
            custom_keys={
                'backbone': dict(lr_mult=0.1),
                'backbone.stages.1': dict(decay_mult=0.5),
                'stages.1.blocks.0.ffn': dict(lr_mult=3.0, decay_mult=2.0),
            },
        ),
    )
    expected = {
        'patch_embed.projection.weight': (1e-3, 0.1),
        'patch_embed.projection.bias': (1e-3, 0.0),
        'norm3.weight': (1e-3, 0.0),
        'stages.1.blocks.0.attn.w_msa.qkv.weight': (1e-2, 0.05),
        'stages.1.blocks.0.attn.w_msa.qkv.bias': (2e-2, 0.05),
        'stages.1.blocks.0.norm1.weight': (1e-2, 0.05),
        'stages.1.blocks.0.ffn.layers.1.bias': (3e-2, 0.2),
    }
    for name, values in expected.items():
        assert found[f'backbone.{name}'] == pytest.approx(values), name
    assert found['neck.0.bias'] == (2e-2, 0.0)


def test_shared_parameters_need_a_decision():
    model = Detector()
    model.head = nn.Linear(16, 16)
    model.copy = nn.Linear(16, 16)
    model.copy.weight = model.head.weight
    with pytest.raises(ValueError, match=r'shape \(16, 16\) is shared.*bypass_dup'):
        build(model, decay_rate=0.5)
    wrapper = build(model, decay_rate=0.5, bypass_duplicate=True)
    assert set(settings(model, wrapper)) == {n for n, _ in model.named_parameters()}
    count = sum(len(group['params']) for group in wrapper.optimizer.param_groups)
    assert count == len(list(model.parameters()))


def test_classifiers_and_wrapped_models(tmp_path):
    classifier = build_stock(
        'ImageClassifier',
        backbone=dict(type='DaViT', **CASES['DaViT'][0]),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=3, in_channels=96),
    )
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    try:
        wrapped = build(MMDistributedDataParallel(classifier), decay_rate=0.5)
    finally:
        torch.distributed.destroy_process_group()
    found = settings(classifier, wrapped)
    assert found == settings(classifier, build(classifier, decay_rate=0.5))
    assert found['backbone.patch_embed.projection.weight'][0] == 1e-2 * 0.5**7
    assert found['backbone.stages.3.blocks.0.channel_block.norm1.weight'][0] == 5e-3
    assert found['head.fc.weight'][0] == 1e-2


def test_groups_are_logged_once(tmp_path):
    log = tmp_path / 'run.log'
    MMLogger.get_instance('test_groups_are_logged_once', log_file=str(log))
    model = Detector()
    build(model, decay_rate=0.5, norm_decay_mult=0.0)
    text = log.read_text()
    assert text.count('layer-wise learning-rate decay:') == 1
    lines = text.split('layer-wise learning-rate decay:\n')[1].splitlines()
    assert lines[0].endswith('weight decay  tensors   parameters')
    rows = [[float(value) for value in line.split()] for line in lines[1:]]
    assert sorted(row[:4] for row in rows) == [
        [0, 0.125, 0.00125, 0.1],
        [1, 0.25, 0.0025, 0],
        [1, 0.25, 0.0025, 0.1],
        [2, 0.5, 0.005, 0],
        [2, 0.5, 0.005, 0.1],
        [3, 1, 0.01, 0],
        [3, 1, 0.01, 0.1],
    ]
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(row[4] for row in rows) == len(sizes)
    assert sum(row[5] for row in rows) == sum(sizes)


def test_models_and_backbones_without_depths_are_named():
    model = Detector()
    model.backbone = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match='no block is found in Sequential'):
        build(model, decay_rate=0.5)
    with pytest.raises(ValueError, match='LayerNorm has no backbone'):
        build(nn.LayerNorm(2), decay_rate=0.5)
