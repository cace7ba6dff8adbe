"""The ways that weights reach a backbone, and what is said of them."""

import copy
import pickle

import pytest
import timm
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.runner import load_checkpoint

import condtok_mm
from condtok_mm.checkpoints import convert_checkpoint, load_backbone

from ..conftest import randomise
from . import sources

SWIN = dict(type='CondTokSwinTransformer')
CONFIG = '/demo/mask-rcnn_swin-demo-condtok_fpn_shapes.py'


@pytest.fixture(scope='module')
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp('swin') / 'swin.pth'
    source = randomise(timm.create_model('swin_tiny_patch4_window7_224'))
    torch.save(dict(model=source.state_dict()), path)
    return str(path)


@pytest.fixture
def weights(file):
    backbone = sources.build(**SWIN)
    load_backbone(backbone, file)
    return backbone.state_dict()


def assert_same(backbone, weights):
    actual = backbone.state_dict()
    assert all(torch.equal(actual[key], weights[key]) for key in weights)


@pytest.mark.parametrize('wrap', [False, True], ids=['CondTokSwin', 'CondTok'])
def test_init_cfg(file, weights, wrap):
    init_cfg = dict(type='Pretrained', checkpoint=file)
    cfg = dict(SWIN, init_cfg=init_cfg)
    if wrap:
        stock = dict(type='SwinTransformer', init_cfg=init_cfg)
        cfg = dict(type='CondTok', backbone=stock)
    backbone = MODELS.build(cfg)
    backbone.init_weights()
    assert backbone.is_init
    assert_same(backbone, weights)


def test_init_cfg_of_a_backbone_inside_a_detector(tmp_path):
    cfg = Config.fromfile(condtok_mm.CONFIGS + CONFIG).model
    trained = randomise(MODELS.build(cfg)).state_dict()
    torch.save(dict(state_dict=trained), tmp_path / 'detector.pth')
    checkpoint = str(tmp_path / 'detector.pth')
    cfg.backbone.init_cfg = dict(type='Pretrained', checkpoint=checkpoint)
    model = MODELS.build(cfg)
    model.init_weights()
    for key, value in model.backbone.state_dict().items():
        assert torch.equal(value, trained[f'backbone.{key}'])


def test_prefix_of_init_cfg_chooses(tmp_path, weights):
    both = {f'a.{key}': value * 0 for key, value in weights.items()}
    both |= {f'b.{key}': value for key, value in weights.items()}
    torch.save(both, tmp_path / 'both.pth')
    backbone = sources.build(**SWIN)
    load_backbone(backbone, tmp_path / 'both.pth', prefix='b')
    assert_same(backbone, weights)
    with pytest.raises(ValueError, match=r"no keys with the prefix 'c'"):
        load_backbone(backbone, tmp_path / 'both.pth', prefix='c')


def test_load_state_dict_and_mmengine_convert_too(file, weights):
    content = torch.load(file)
    for load in (
        lambda backbone: backbone.load_state_dict(content['model'], strict=False),
        lambda backbone: load_checkpoint(backbone, file),
    ):
        backbone = sources.build(**SWIN)
        load(backbone)
        assert_same(backbone, weights)


def test_whole_detector_in_the_layout_of_another_library(tmp_path):
    cfg = dict(type='CondTokViT', arch='tiny', use_rel_pos=True)
    source = randomise(sources.build(**cfg))
    detector = torch.nn.Module()
    detector.backbone = sources.build(**cfg)
    torch.save(dict(model=sources.vitdet(source.state_dict())), tmp_path / 'd2.pth')
    state_dict = torch.load(tmp_path / 'd2.pth')['model']
    detector.load_state_dict(state_dict, strict=False)
    assert_same(detector.backbone, source.state_dict())


def test_report(file, tmp_path):
    MMLogger.get_instance('test_report', log_file=str(tmp_path / 'log.txt'))
    backbone = sources.build(**SWIN)
    report = load_backbone(backbone, file)
    assert len(report.matched) == 171
    assert report.new == [f'norm{i}.{n}' for i in range(3) for n in ('weight', 'bias')]
    assert report.unexpected == ['head.fc.weight', 'head.fc.bias']
    assert (report.missing, report.resized) == ([], {})
    printed = (tmp_path / 'log.txt').read_text()
    assert file in printed
    for words in ('171 of 171', 'original or timm Swin, under model', 'head.fc.weight'):
        assert words in printed
    assert printed.count('matched') == 1


def remove(state_dict):
    """Without 40 % of the keys."""
    keys = list(state_dict)
    return {key: state_dict[key] for i, key in enumerate(keys) if i % 5 not in (1, 3)}


def misname(state_dict):
    """Half of the blocks under other names."""
    return {
        key.replace('.blocks.1.', '.block_1.'): value
        for key, value in state_dict.items()
    }


@pytest.mark.parametrize('damage', [remove, misname])
def test_a_file_that_does_not_fit_stops_with_the_counts(damage, file, tmp_path):
    content = torch.load(file)['model']
    path = str(tmp_path / 'damaged.pth')
    torch.save(dict(model=damage(content)), path)
    backbone = sources.build(**SWIN)
    before = copy.deepcopy(backbone.state_dict())
    _, report = convert_checkpoint(damage(content), backbone)
    assert report.share < 0.9
    words = f'only {len(report.matched)} of 171 keys of CondTokSwinTransformer'
    for load in (
        lambda: load_backbone(backbone, path),
        lambda: load_checkpoint(backbone, path),
        lambda: MODELS.build(
            dict(SWIN, init_cfg=dict(type='Pretrained', checkpoint=path))
        ).init_weights(),
    ):
        with pytest.raises(ValueError, match=words):
            load()
    assert_same(backbone, before)
    log = MMLogger.get_instance(damage.__name__, log_file=str(tmp_path / 'log.txt'))
    assert log is MMLogger.get_current_instance()
    lenient = sources.build(**SWIN, min_matched=0)
    lenient.load_state_dict(damage(content), strict=False)
    assert 'WARNING - weights of' in (tmp_path / 'log.txt').read_text()
    expected, _ = convert_checkpoint(content, backbone)
    for key in report.matched:
        assert torch.equal(lenient.state_dict()[key], expected[key])


def test_another_architecture_is_named():
    vit = timm.create_model('vit_tiny_patch16_224').state_dict()
    words = r'only 0 of 169 keys.*No name fits: .* another architecture'
    with pytest.raises(ValueError, match=words):
        sources.build(**SWIN).load_state_dict(vit, strict=False)


def test_weights_of_a_backbone_alone_do_not_load_into_a_detector(file):
    model = MODELS.build(Config.fromfile(condtok_mm.CONFIGS + CONFIG).model)
    with pytest.raises(ValueError, match=r'only 0 of .*belongs into'):
        load_checkpoint(model, file)


def test_other_widths_are_named_with_their_shapes(tmp_path):
    source = timm.create_model('vit_small_patch16_224', depth=12).state_dict()
    backbone = sources.build(type='CondTokViT', arch='tiny')
    words = r'pos_embed 1x197x384 -> 1x14x14x192.*another size.*embed_dims'
    with pytest.raises(ValueError, match=words):
        backbone.load_state_dict(source, strict=False)


def test_copies_convert_for_themselves(file, weights):
    backbone = sources.build(**SWIN)
    for twin in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        twin.load_state_dict(torch.load(file)['model'], strict=False)
        assert_same(twin, weights)
    before = copy.deepcopy(backbone)
    twin = copy.deepcopy(backbone)
    twin.init_cfg = dict(type='Pretrained', checkpoint=file)
    twin.init_weights()
    assert_same(twin, weights)
    assert_same(backbone, before.state_dict())


def test_layers_of_detection_need_not_be_there_and_others_must(weights):
    backbone = sources.build(**SWIN)
    del weights['norm0.weight'], weights['stages.0.blocks.0.norm1.weight']
    _, report = convert_checkpoint(weights, backbone)
    assert report.new == ['norm0.weight']
    assert report.missing == ['stages.0.blocks.0.norm1.weight']
    stock = dict(type='mmpretrain.VAN', arch='tiny')
    backbone = sources.build(type='CondTok', backbone=stock)
    state_dict = backbone.state_dict()
    del state_dict['norm1.weight']
    _, report = convert_checkpoint(state_dict, backbone)
    assert report.missing == ['norm1.weight']


def test_calibrated_conditioner_comes_along():
    cfg = dict(SWIN, conditioner=dict(kappa=2.0, floor=0.1))
    source = sources.build(**cfg)
    state_dict = source.state_dict() | {'conditioner.preconditioner': torch.eye(96)}
    backbone = sources.build(**cfg)
    backbone.load_state_dict(state_dict)
    assert torch.equal(backbone.conditioner.preconditioner, torch.eye(96))


@pytest.mark.parametrize('value', [-0.1, 1.5, 'all', True])
def test_min_matched_is_checked(value):
    words = r'min_matched must (lie|be a number) in \[0, 1\]'
    with pytest.raises((TypeError, ValueError), match=words):
        sources.build(**SWIN, min_matched=value)


def damaged(**changes):
    """A ViT's file with some keys replaced, or removed where None is given."""
    file = timm.create_model('vit_tiny_patch16_224').state_dict() | changes
    return {key: value for key, value in file.items() if value is not None}


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'patch_embed.proj.weight': None}, r'patch_embed.projection.weight cannot be'),
        ({'pos_embed': torch.zeros(1, 198, 192)}, r'pos_embed cannot be done without'),
        (
            {'blocks.0.attn.q_norm.weight': torch.ones(64)},
            r'q_norm.weight have no place',
        ),
    ],
)
def test_a_high_share_is_not_enough(changes, words):
    backbone = sources.build(type='CondTokViT', arch='tiny')
    with pytest.raises(ValueError, match=words):
        backbone.load_state_dict(damaged(**changes), strict=False)
    backbone = sources.build(type='CondTokViT', arch='tiny', min_matched=0)
    backbone.load_state_dict(damaged(**changes), strict=False)


def test_version_2_of_swin_is_no_swin():
    file = timm.create_model('swinv2_tiny_window8_256').state_dict()
    stock = dict(type='mmpretrain.SwinTransformerV2', arch='tiny', window_size=8)
    backbone = sources.build(type='CondTok', backbone=stock)
    with pytest.raises(ValueError, match=r'only \d+ of'):
        backbone.load_state_dict(file, strict=False)


def test_biases_of_layers_without_become_zero(tmp_path):
    source = timm.create_model('vit_tiny_patch16_224', qkv_bias=False)
    torch.save(source.state_dict(), tmp_path / 'vit.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))
    backbone = sources.build(type='CondTokViT', arch='tiny', init_cfg=init_cfg)
    backbone.init_weights()
    assert all(not layer.attn.qkv.bias.any() for layer in backbone.layers)
    backbone.init_weights()
    assert backbone.is_init


def test_shared_positions_of_beit_load_as_in_the_stock_class():
    arch = dict(embed_dims=48, num_layers=2, num_heads=2, feedforward_channels=96)
    cfg = dict(
        type='mmpretrain.BEiTViT',
        arch=arch,
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=True,
    )
    source, stock = randomise(sources.build(**cfg)), sources.build(**cfg)
    stock.load_state_dict(source.state_dict())
    backbone = sources.build(type='CondTok', backbone=cfg)
    backbone.load_state_dict(source.state_dict())
    assert_same(backbone, stock.state_dict())


def test_the_teacher_is_taken_and_the_student_is_named(weights):
    both = {f'student.{key}': value * 0 for key, value in weights.items()}
    both |= {f'teacher.{key}': value for key, value in weights.items()}
    backbone = sources.build(**SWIN)
    converted, report = convert_checkpoint(both, backbone)
    assert report.found_under == 'teacher'
    assert "'student.'" in report.notes[0]
    assert torch.equal(converted['norm3.bias'], weights['norm3.bias'])


def test_wrappers_that_hold_nothing_or_themselves(weights):
    content = dict(state_dict_ema={}, state_dict=weights)
    _, report = convert_checkpoint(content, sources.build(**SWIN))
    assert report.share == 1
    content = {}
    content['model'] = content
    with pytest.raises(ValueError, match='holds no weights'):
        convert_checkpoint(content, sources.build(**SWIN))
