"""Checkpoints of other image, window and patch sizes."""

import cv2
import numpy as np
import pytest
import timm
import torch
from torch.nn import functional as F

from condtok_mm.checkpoints import convert_checkpoint, load_backbone

from ..conftest import photograph, randomise
from . import sources


def bicubic(grid, size):
    """OpenCV's bicubic resize of (h, w, D) to (H, W), in float64."""
    height, width = size
    return cv2.resize(
        np.asarray(grid, dtype=np.float64),
        (width, height),
        interpolation=cv2.INTER_CUBIC,
    )


@pytest.fixture
def vit():
    return randomise(timm.create_model('vit_tiny_patch16_224')).state_dict()


def test_square_grid_with_class_token_into_512_by_768(vit, tmp_path):
    backbone = sources.build(type='CondTokViT', arch='tiny', img_size=(512, 768))
    torch.save(dict(model=vit), tmp_path / 'vit.pth')
    report = load_backbone(backbone, tmp_path / 'vit.pth')
    assert report.resized == {'pos_embed': ((1, 197, 192), (1, 32, 48, 192))}
    assert report.share == 1
    assert report.unexpected[:1] == ['cls_token']
    grid = vit['pos_embed'][0, 1:].unflatten(0, (14, 14))
    expected = bicubic(grid, (32, 48))
    assert np.abs(backbone.pos_embed[0].detach().numpy() - expected).max() < 1e-5
    with torch.no_grad():
        (features,) = backbone(photograph(512, 768)[None])
    assert features.shape == (1, 192, 32, 48)
    assert features.isfinite().all()


def test_class_token_is_kept_where_the_backbone_has_one(vit):
    stock = dict(type='mmpretrain.VisionTransformer', arch='deit-tiny', img_size=320)
    backbone = sources.build(type='CondTok', backbone=stock)
    converted, report = convert_checkpoint(vit, backbone)
    assert report.share == 1
    positions = converted['pos_embed']
    assert positions.shape == (1, 401, 192)
    assert torch.equal(positions[:, 0], vit['pos_embed'][:, 0])
    grid = vit['pos_embed'][0, 1:].unflatten(0, (14, 14))
    expected = bicubic(grid, (20, 20)).reshape(400, 192)
    assert np.abs(positions[0, 1:].numpy() - expected).max() < 1e-5


def test_window_12_into_window_7():
    source = timm.create_model(
        'swin_tiny_patch4_window7_224', window_size=12, img_size=384
    )
    source = randomise(source).state_dict()
    backbone = sources.build(type='CondTokSwinTransformer')
    converted, report = convert_checkpoint(source, backbone)
    assert report.share == 1
    assert len(report.resized) == 12
    name = 'stages.1.blocks.1.attn.w_msa.relative_position_bias_table'
    assert report.resized[name] == ((529, 6), (169, 6))
    table = source['layers.1.blocks.1.attn.relative_position_bias_table']
    expected = bicubic(table.unflatten(0, (23, 23)), (13, 13)).reshape(169, 6)
    assert np.abs(converted[name].numpy() - expected).max() < 1e-5
    backbone.load_state_dict(converted, strict=False)
    index = name.replace('bias_table', 'index')
    assert backbone.state_dict()[index].max() == 168


def test_patch_16_into_patch_14(vit):
    backbone = sources.build(type='CondTokViT', arch='tiny', patch_size=14)
    converted, report = convert_checkpoint(vit, backbone)
    assert report.share == 1
    assert set(report.resized) == {'pos_embed', 'patch_embed.projection.weight'}
    weight = vit['patch_embed.proj.weight'].double()
    basis = np.stack([bicubic(e, (14, 14)) for e in np.eye(256).reshape(-1, 16, 16)])
    expected = np.linalg.lstsq(
        basis.reshape(256, 196), weight.flatten(0, 1).flatten(1).numpy().T, rcond=None
    )[0].T
    actual = converted['patch_embed.projection.weight'].flatten(0, 1).flatten(1)
    assert np.abs(actual.numpy() - expected).max() < 1e-5


def test_patches_see_in_a_larger_image_what_they_saw(vit):
    backbone = sources.build(type='CondTokViT', arch='tiny', patch_size=20)
    converted, _ = convert_checkpoint(vit, backbone)
    patch = torch.randn(1, 3, 16, 16)
    larger = F.interpolate(patch, size=20, mode='bicubic', align_corners=False)
    before = (patch * vit['patch_embed.proj.weight']).sum((1, 2, 3))
    after = (larger * converted['patch_embed.projection.weight']).sum((1, 2, 3))
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_relative_positions_of_another_window():
    cfg = dict(type='CondTokViT', arch='tiny', use_rel_pos=True)
    source = randomise(sources.build(**cfg, window_size=7))
    backbone = sources.build(**cfg, window_size=14)
    converted, report = convert_checkpoint(source.state_dict(), backbone)
    name = 'layers.0.attn.rel_pos_h'
    assert report.resized[name] == ((13, 64), (27, 64))
    old = source.state_dict()[name].numpy().astype(float)
    places = np.clip((np.arange(27) + 0.5) * 13 / 27 - 0.5, 0, 12)
    expected = np.stack([np.interp(places, np.arange(13), row) for row in old.T], 1)
    assert np.abs(converted[name].numpy() - expected).max() < 1e-5


def test_absolute_positions_of_swin():
    source = sources.build(type='mmpretrain.SwinTransformer', use_abs_pos_embed=True)
    source = randomise(source).state_dict()
    backbone = sources.build(
        type='CondTokSwinTransformer', use_abs_pos_embed=True, pretrain_img_size=384
    )
    converted, report = convert_checkpoint(source, backbone)
    assert report.share == 1
    expected = bicubic(source['absolute_pos_embed'][0].unflatten(0, (56, 56)), (96, 96))
    actual = converted['absolute_pos_embed'][0].unflatten(0, (96, 96))
    assert np.abs(actual.numpy() - expected).max() < 1e-5


def test_rectangular_grids_are_not_guessed():
    """14 x 16 patches and a class token are 225 positions, which is 15 x 15."""
    source = timm.create_model('vit_tiny_patch16_224', img_size=(224, 256))
    source = randomise(source).state_dict()
    backbone = sources.build(type='CondTokViT', arch='tiny', img_size=(448, 512))
    _, report = convert_checkpoint(source, backbone)
    assert report.mismatched == {'pos_embed': ((1, 225, 192), (1, 28, 32, 192))}
    same = sources.build(type='CondTokViT', arch='tiny', img_size=(224, 256))
    converted, report = convert_checkpoint(source, same)
    assert report.share == 1
    expected = source['pos_embed'][:, 1:].unflatten(1, (14, 16))
    assert torch.equal(converted['pos_embed'], expected)


def test_square_grid_into_as_many_patches_in_a_row(vit):
    backbone = sources.build(type='CondTokViT', arch='tiny', img_size=(112, 448))
    converted, _ = convert_checkpoint(vit, backbone)
    expected = bicubic(vit['pos_embed'][0, 1:].unflatten(0, (14, 14)), (7, 28))
    assert np.abs(converted['pos_embed'][0].numpy() - expected).max() < 1e-5
