"""Attaching to backbones of mmdet and mmpretrain, and taking the conditioner off."""

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmpretrain import models  # noqa: F401

from condtok_mm.conditioning import (
    TokenConditioner,
    attach_conditioner,
    detach_conditioner,
)

from ..conftest import batch_images, photograph, randomise

VIT = dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=96)
SWIN = dict(depths=(2, 2), num_heads=(1, 2), out_indices=(0, 1))
PVT = dict(embed_dims=16, num_layers=[1, 1, 1, 1])
BACKBONES = {
    'mmdet.SwinTransformer': (dict(embed_dims=24, **SWIN), 'patch_embed'),
    'mmdet.PyramidVisionTransformer': (PVT, 'layers.0.0'),
    'mmdet.PyramidVisionTransformerV2': (PVT, 'layers.0.0'),
    'mmpretrain.VisionTransformer': (
        dict(arch=VIT, img_size=96, patch_size=8, out_type='featmap'),
        'patch_embed',
    ),
    'mmpretrain.ViTSAM': (
        dict(arch=VIT | dict(global_attn_indexes=[1]), img_size=96, patch_size=8),
        'patch_embed',
    ),
    'mmpretrain.SwinTransformer': (
        dict(
            arch=dict(embed_dims=24, depths=(2, 2), num_heads=(1, 2)),
            img_size=96,
            out_indices=(1,),
        ),
        'patch_embed',
    ),
    'mmpretrain.XCiT': (
        dict(embed_dims=48, depth=2, cls_attn_layers=1, num_heads=3, patch_size=8),
        'patch_embed',
    ),
}


@pytest.mark.parametrize('name', BACKBONES)
def test_attach_conditions_and_detach_restores(name):
    kwargs, embed = BACKBONES[name]
    with DefaultScope.overwrite_default_scope(name.split('.')[0]):
        backbone = randomise(MODELS.build(dict(type=name, **kwargs)))
    backbone.eval()
    images = batch_images([photograph(96, 96, 1), photograph(64, 96, 2)])
    keys = list(backbone.state_dict())
    with torch.no_grad():
        before = backbone(images)
        attach_conditioner(backbone, TokenConditioner(floor=0.1), embed)
        assert list(backbone.state_dict()) == keys
        conditioned = backbone(images)
        alone = backbone(images[:1])
        detach_conditioner(backbone)
        after = backbone(images)
    for old, new, other, single in zip(before, after, conditioned, alone, strict=True):
        assert torch.equal(old, new)
        assert other.isfinite().all()
        assert not torch.allclose(other, old)
        torch.testing.assert_close(other[:1], single, rtol=1e-3, atol=1e-3)
