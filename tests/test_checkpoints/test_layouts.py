"""Files of every layout give a backbone the features of the model they came from."""

import pytest
import timm
import torch
from mmengine.config import ConfigDict

from condtok_mm.checkpoints import convert_checkpoint, load_backbone

from ..conftest import photograph, randomise
from . import sources


def image(size):
    return photograph(size, size)[None]


def vit_case(name, layout=dict, kind='VisionTransformer', **cfg):
    """A timm ViT, its file, and mmpretrain's class for it with a conditioner off."""
    source = sources.timm_model(name, **cfg.pop('timm', {}))
    backbone = sources.build(
        type='CondTok', backbone=dict(type=f'mmpretrain.{kind}', **sources.VIT | cfg)
    )
    state_dict = layout(source.state_dict())
    prefix = source.num_prefix_tokens

    def features(x):
        return source.forward_features(x)[:, prefix:].mT.unflatten(2, (14, 14))

    return features, state_dict, backbone, 224


def swin_case(layout=dict, **cfg):
    source = sources.timm_model('swin_tiny_patch4_window7_224', img_size=448)
    backbone = sources.build(type='CondTokSwinTransformer', out_indices=(3,), **cfg)

    def features(x):
        return source.forward_features(x).permute(0, 3, 1, 2)

    return features, layout(source.state_dict()), backbone, 448


def xcit_case(layout=dict):
    source = sources.timm_model('xcit_nano_12_p16_224')
    backbone = sources.build(
        type='CondTok',
        backbone=dict(
            type='mmpretrain.XCiT',
            embed_dims=128,
            depth=12,
            num_heads=4,
            out_type='featmap',
        ),
    )

    def features(x):
        return source.forward_features(x)[:, 1:].mT.unflatten(2, (7, 7))

    return features, layout(source.state_dict()), backbone, 112


DINOV2 = dict(
    arch=dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=768),
    layer_scale_init_value=1e-5,
)
CASES = {
    'timm ViT': lambda: vit_case('vit_tiny_patch16_224'),
    'timm DeiT, distilled': lambda: vit_case(
        'deit_tiny_distilled_patch16_224', kind='DistilledVisionTransformer'
    ),
    'MAE': lambda: vit_case('vit_tiny_patch16_224', sources.mae),
    'DINOv2': lambda: vit_case(
        'vit_tiny_patch16_224', timm=dict(init_values=1.0), **DINOV2
    ),
    'DINOv2 in chunks': lambda: vit_case(
        'vit_tiny_patch16_224', sources.chunked, timm=dict(init_values=1.0), **DINOV2
    ),
    'DINOv2 of transformers': lambda: vit_case(
        'vit_tiny_patch16_224',
        sources.transformers_dinov2,
        timm=dict(init_values=1.0),
        **DINOV2,
    ),
    'layer scale into a backbone without': lambda: vit_case(
        'vit_tiny_patch16_224', timm=dict(init_values=1.0)
    ),
    'no position for the class token': lambda: vit_case(
        'vit_tiny_patch16_224', timm=dict(no_embed_class=True)
    ),
    'timm Swin': swin_case,
    'original Swin': lambda: swin_case(sources.original_swin),
    'original Swin, stock attention': lambda: swin_case(
        sources.original_swin, attn='stock'
    ),
    'timm XCiT': xcit_case,
    'original XCiT': lambda: xcit_case(sources.original_xcit),
}


@pytest.mark.parametrize('case', CASES)
def test_features_of_the_source(case, tmp_path):
    features, state_dict, backbone, size = CASES[case]()
    torch.save(dict(model=state_dict), tmp_path / 'source.pth')
    report = load_backbone(backbone, tmp_path / 'source.pth')
    assert report.share == 1
    assert report.missing == report.new == []
    x = image(size)
    with torch.no_grad():
        expected, actual = features(x), backbone(x)[-1]
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize('case', CASES)
def test_converting_twice_changes_nothing(case):
    _, state_dict, backbone, _ = CASES[case]()
    once, first = convert_checkpoint(state_dict, backbone)
    twice, second = convert_checkpoint(once, backbone)
    assert list(once) == list(twice)
    assert all(torch.equal(once[key], twice[key]) for key in once)
    assert second.layout == 'OpenMMLab'
    assert second.matched == first.matched


def openmmlab_cases():
    swin = dict(type='SwinTransformer')
    vit = dict(type='CondTokViT', arch='tiny', use_rel_pos=True)
    xcit = dict(type='CondTokXCiT', arch='tiny-12')
    return {
        'mmdet Swin': (swin, dict(swin, type='CondTokSwinTransformer'), 128),
        'mmpretrain ViTSAM': (
            dict(
                type='mmpretrain.ViTSAM',
                arch=dict(
                    embed_dims=192,
                    num_layers=12,
                    num_heads=3,
                    feedforward_channels=768,
                    global_attn_indexes=[2, 5, 8, 11],
                ),
                img_size=224,
                out_channels=0,
                use_rel_pos=True,
            ),
            vit,
            224,
        ),
        'CondTokXCiT': (xcit, xcit, 96),
    }


@pytest.mark.parametrize('case', openmmlab_cases())
def test_openmmlab_files_are_their_own_layout(case):
    source, target, size = openmmlab_cases()[case]
    source = randomise(sources.build(**source))
    backbone = sources.build(**target)
    converted, report = convert_checkpoint(source.state_dict(), backbone)
    assert report.layout == 'OpenMMLab'
    assert (report.missing, report.unexpected, report.new) == ([], [], [])
    backbone.load_state_dict(converted)
    x = image(size)
    with torch.no_grad():
        pairs = zip(source(x), backbone(x), strict=True)
        assert all((a - b).abs().max() <= 1e-4 * a.abs().max() for a, b in pairs)


def test_vitdet_of_detectron2():
    cfg = dict(type='CondTokViT', arch='tiny', use_rel_pos=True)
    source = randomise(sources.build(**cfg))
    file = sources.vitdet(source.state_dict())
    converted, report = convert_checkpoint(dict(model=file), sources.build(**cfg))
    assert report.found_under == 'model.backbone.net'
    assert (report.missing, report.unexpected) == ([], [])
    expected = source.state_dict()
    assert all(torch.equal(converted[key], expected[key]) for key in expected)


def test_original_xcit_detector_brings_its_levels():
    cfg = dict(type='CondTokXCiT', arch='tiny-12')
    source = randomise(sources.build(**cfg)).state_dict()
    levels = {
        key.replace('levels.0.', 'fpn1.').replace('levels.1.', 'fpn2.'): value
        for key, value in source.items()
        if key.startswith('levels.')
    }
    trunk = sources.original_xcit(
        timm.create_model('xcit_tiny_12_p16_224').state_dict()
    )
    file = {f'backbone.{key}': value for key, value in (trunk | levels).items()}
    converted, report = convert_checkpoint(dict(state_dict=file), sources.build(**cfg))
    assert report.missing == report.new == []
    for key, value in source.items():
        if key.startswith('levels.'):
            assert torch.equal(converted[key], value)


@pytest.mark.parametrize('model', ['vit', 'swin', 'xcit'])
def test_wrappings_make_no_difference(model, tmp_path):
    from safetensors.torch import save_file

    if model == 'vit':
        source = timm.create_model('vit_tiny_patch16_224')
        cfg = dict(type='CondTokViT', arch='tiny')
    elif model == 'swin':
        source = timm.create_model('swin_tiny_patch4_window7_224')
        cfg = dict(type='CondTokSwinTransformer')
    else:
        source = timm.create_model('xcit_tiny_12_p16_224')
        cfg = dict(type='CondTokXCiT', arch='tiny-12')
    state_dict = randomise(source).state_dict()
    files = []
    for name, content in sources.wrapped(state_dict).items():
        files.append(tmp_path / f'{name}.pth')
        torch.save(content, files[-1])
    files.append(tmp_path / 'bare.safetensors')
    save_file(state_dict, files[-1])
    loaded = []
    for file in files:
        backbone = sources.build(**cfg)
        report = load_backbone(backbone, file)
        assert report.share == 1, file
        loaded.append(backbone.state_dict())
    expected, _ = convert_checkpoint(state_dict, backbone)
    for other in loaded:
        compared = [
            key for key in report.matched if torch.equal(other[key], expected[key])
        ]
        assert compared == report.matched


def test_original_pvt_as_mmdet_reads_it(tmp_path):
    torch.save(sources.pvt(), tmp_path / 'pvt.pth')
    init_cfg = dict(checkpoint=str(tmp_path / 'pvt.pth'))
    cfg = dict(
        type='PyramidVisionTransformer',
        embed_dims=8,
        num_layers=[1, 2, 1, 1],
        num_heads=[1, 2, 4, 8],
        mlp_ratios=[4, 4, 4, 4],
        init_cfg=init_cfg,
    )
    stock = sources.build(**cfg | dict(init_cfg=ConfigDict(init_cfg)))
    stock.init_weights()
    backbone = sources.build(type='CondTok', backbone=cfg)
    backbone.init_weights()
    _, report = convert_checkpoint(sources.pvt(), backbone)
    assert report.layout == 'original PVT'
    assert (report.missing, report.unexpected) == ([], [])
    expected = stock.state_dict()
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, expected[key]), key
