"""CondTok on the stock backbones of mmdet and mmpretrain."""

import copy
import pickle
from collections import OrderedDict

import cv2
import numpy as np
import pytest
import torch
from mmdet.models import PyramidVisionTransformer
from mmdet.models import SwinTransformer as DetSwin
from mmdet.registry import MODELS as DET
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmpretrain.models import SwinTransformer as PreSwin
from mmpretrain.models import VisionTransformer
from mmpretrain.registry import MODELS as PRE
from torch import nn

from condtok_mm.analysis import measure_wrapped
from condtok_mm.analysis.wrapped_backbones import WRAPPED, load_square, run_seeded
from condtok_mm.conditioning import TokenConditioner, attach_conditioner
from condtok_mm.conditioning.attach import conditioned_layer
from condtok_mm.models import CondTok
from condtok_mm.models.backbones.any import find_embedding

from ..conftest import MEAN, STD, batch_images, photograph

PVT = dict(type='PyramidVisionTransformer', embed_dims=16, num_layers=[1, 1, 1, 1])
UNPICKLABLE = ('mmpretrain.RevVisionTransformer',)
"""Stock classes that hold a lambda."""


def build_stock(cfg):
    with DefaultScope.overwrite_default_scope(cfg['type'].partition('.')[0]):
        stock = MODELS.build(cfg)
    stock.eval()
    return stock


def wrap(case, stock, **conditioner):
    """The backbone under CondTok with the weights of the stock one."""
    conditioner = case.get('conditioner', {}) | conditioner if conditioner else None
    wrapped = CondTok(**case | dict(conditioner=conditioner))
    assert type(wrapped) is type(stock)
    assert list(wrapped.state_dict()) == list(stock.state_dict())
    wrapped.load_state_dict(stock.state_dict(), strict=False)
    wrapped.eval()
    return wrapped


def outputs_behind(layer, backbone, images):
    """What a layer returns while a backbone runs, as matrices (N, D) in NumPy."""
    outputs = []
    handle = layer.register_forward_hook(lambda *args: outputs.append(args[2]))
    run_seeded(backbone, images)
    handle.remove()
    output = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    if output.dim() == 4 and output.shape[2:] in ((56, 56), (14, 14)):
        output = output.movedim(1, -1)
    return output[0].flatten(0, -2).double().numpy()


def assert_equal(outputs, expected):
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize('case', WRAPPED, ids=lambda case: case['backbone']['type'])
@torch.no_grad()
def test_off_is_stock_and_on_is_conditioned(case):
    stock = build_stock(case['backbone'])
    image = photograph(224, 224)[None]
    expected = run_seeded(stock, image)
    off = wrap(case, stock)
    assert not hasattr(off, 'conditioner')
    assert_equal(run_seeded(off, image), expected)

    backbone = wrap(case, stock, kappa=2.0, floor=0.0)
    layer = conditioned_layer(backbone)
    name = next(name for name, child in backbone.named_modules() if child is layer)
    X = outputs_behind(stock.get_submodule(name), stock, image)
    values = np.linalg.svd(X, compute_uv=False)
    rank = int((values > 4.8e-7 * values[0]).sum())
    assert values[0] > 10 * values[rank - 1]
    values = np.linalg.svd(outputs_behind(layer, backbone, image), compute_uv=False)
    assert values[0] <= 2.02 * values[rank - 1]

    conditioned = run_seeded(backbone, image)
    assert not torch.equal(conditioned[0], expected[0])
    copies = [copy.deepcopy(backbone)]
    if case['backbone']['type'] not in UNPICKLABLE:
        copies.append(pickle.loads(pickle.dumps(backbone)))
    for copied in copies:
        assert conditioned_layer(copied).forward.conditioner is copied.conditioner
        assert copied.conditioner is not backbone.conditioner
    assert_equal(run_seeded(copies[-1], image), conditioned)

    backbone.conditioner.strength = 0
    assert_equal(run_seeded(backbone, image), expected)
    images = image.expand(2, -1, -1, -1)
    stock.train()
    backbone.train()
    assert_equal(run_seeded(backbone, images), run_seeded(stock, images))


@PRE.register_module()
class EmbedOfPretrain(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 16, 8, 8)


@PRE.register_module()
class BackboneOfPretrain(nn.Module):
    """Registered in mmpretrain only, and so is the layer that it builds by name."""

    def __init__(self):
        super().__init__()
        self.patch_embed = MODELS.build(dict(type='EmbedOfPretrain'))

    def forward(self, images):
        return self.patch_embed(images)


@DET.register_module()
class BackboneWithConditioner(BackboneOfPretrain):
    """Attaches a conditioner itself, and has no argument for it."""

    def __init__(self):
        nn.Module.__init__(self)
        self.patch_embed = nn.Conv2d(3, 16, 8, 8)
        attach_conditioner(self, TokenConditioner())


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmpretrain'])
@pytest.mark.parametrize('name', ['CondTok', 'mmdet.CondTok', 'mmpretrain.CondTok'])
def test_found_from_every_scope(scope, name):
    with DefaultScope.overwrite_default_scope(scope):
        for registry in (MODELS, DET, PRE):
            cfg = dict(type=name, backbone=PVT, conditioner=dict(floor=0.1))
            backbone = registry.build(cfg)
            assert type(backbone) is PyramidVisionTransformer
            assert backbone.conditioner.floor == 0.1


@pytest.mark.parametrize(
    ('scope', 'cfg', 'expected'),
    [
        ('mmdet', dict(type='SwinTransformer'), DetSwin),
        ('mmpretrain', dict(type='SwinTransformer'), PreSwin),
        ('mmengine', dict(type='SwinTransformer'), DetSwin),
        ('mmdet', dict(type='mmpretrain.SwinTransformer'), PreSwin),
        ('mmpretrain', dict(type='mmdet.SwinTransformer'), DetSwin),
        ('mmdet', dict(type='SwinTransformer', _scope_='mmpretrain'), PreSwin),
        ('mmdet', dict(type=PreSwin), PreSwin),
        ('mmdet', dict(type='VisionTransformer'), VisionTransformer),
        ('mmpretrain', PVT, PyramidVisionTransformer),
        ('mmdet', dict(type='BackboneOfPretrain'), BackboneOfPretrain),
        ('mmdet', dict(type='mmpretrain.models.VisionTransformer'), VisionTransformer),
    ],
)
def test_the_scope_in_use_comes_first(scope, cfg, expected):
    before = copy.deepcopy(cfg)
    with DefaultScope.overwrite_default_scope(scope):
        backbone = CondTok(cfg, conditioner=dict())
        assert DefaultScope.get_current_instance().scope_name == scope
    assert type(backbone) is expected
    assert backbone.conditioner.kappa == 2.0
    assert cfg == before


@pytest.mark.parametrize(
    ('cfg', 'error', 'words'),
    [
        (
            dict(type='PyramidVisionTransformr'),
            ValueError,
            "no backbone 'PyramidVisionTransformr' is registered in mmdet, mmpretrain; "
            'close names: PyramidVisionTransformer, ',
        ),
        (dict(type='zzzz'), ValueError, 'close names: none'),
        (dict(type='mmdet.VisionTransfomer'), ValueError, 'names: VisionTransformer'),
        (dict(type=3), TypeError, 'must be a name or a class, but got 3'),
        (dict(depth=50), TypeError, "must be a config, as .* but got {'depth': 50}"),
        (None, TypeError, 'but got None'),
        (dict(type='CondTok', backbone=PVT), TypeError, 'CondTok takes a conditioner'),
        (dict(type='CondTokViT'), TypeError, 'use it in place of CondTok'),
        (dict(type='CondTokSwinTransformer'), TypeError, 'not inside it'),
        (dict(type='BackboneWithConditioner'), ValueError, 'has a conditioner already'),
        (
            dict(type='ResNet', depth=18),
            ValueError,
            r'ResNet has no patch embedding.*: conv1 \(Conv2d\), bn1 .* set embed',
        ),
        (dict(type='MobileViT'), ValueError, r'has no patch embedding.*stem \(Conv'),
        (
            dict(type='Conformer'),
            ValueError,
            'of Conformer is not obvious: trans_patch_conv may be one.*Set embed',
        ),
    ],
)
def test_wrong_backbone_is_explained(cfg, error, words):
    with (
        DefaultScope.overwrite_default_scope('mmdet'),
        pytest.raises(error, match=words),
    ):
        CondTok(cfg, conditioner=dict())


@pytest.mark.parametrize(
    ('kwargs', 'error', 'words'),
    [
        (dict(embed='stem'), ValueError, "no layer 'stem'; its children: layers"),
        (
            dict(embed='layers.1.0'),
            ValueError,
            'layers.1.0 of PyramidVisionTransformer takes features.*pad_value=None',
        ),
        (dict(conditioner=dict(kapa=2)), TypeError, 'no argument kapa'),
        (dict(conditioner=2.0), TypeError, 'but got 2.0'),
        (dict(conditioner=dict(kappa=1)), ValueError, 'kappa must lie'),
    ],
)
def test_wrong_arguments_are_explained(kwargs, error, words):
    with pytest.raises(error, match=words):
        CondTok(PVT, **dict(conditioner=dict()) | kwargs)


def test_a_conditioner_ready_made_behind_a_layer_that_is_named():
    conditioner = TokenConditioner(pad_value=None)
    backbone = CondTok(PVT, 'layers.1.0', conditioner)
    assert backbone.conditioner is conditioner
    assert conditioned_layer(backbone) is backbone.layers[1][0]


def layers(**named):
    return nn.Sequential(OrderedDict(named))


class HybridPatchEmbed(nn.Sequential):
    pass


CONV = nn.Conv2d(3, 8, 4)


@pytest.mark.parametrize(
    ('backbone', 'expected'),
    [
        (layers(patch_embed=CONV, norm=nn.BatchNorm2d(8)), 'patch_embed'),
        (layers(pos=nn.Linear(2, 8), tower=HybridPatchEmbed(CONV)), 'tower'),
        (layers(timm_model=layers(patch_embed=CONV)), 'timm_model.patch_embed'),
        (layers(tokens_to_token=nn.Sequential(nn.Unfold(4))), 'tokens_to_token'),
        (
            layers(patch_embeds=nn.ModuleList([HybridPatchEmbed(CONV), CONV])),
            'patch_embeds.0',
        ),
        (layers(patch_embed=layers(patch_embed=CONV)), 'patch_embed'),
    ],
)
def test_embedding_is_found(backbone, expected):
    assert find_embedding(backbone) == expected


def test_embedding_behind_other_layers_is_not_guessed():
    backbone = layers(stem=nn.Conv2d(3, 8, 4), patch_embed=nn.Conv2d(8, 8, 4))
    with pytest.raises(ValueError, match='not obvious: patch_embed may be one'):
        find_embedding(backbone)


def test_batch_mates_do_not_matter():
    layer = conditioned_layer(CondTok(PVT, conditioner=dict(floor=0.1)))
    image = photograph(64, 96)
    alone, _ = layer(image[None])
    batched, (rows, columns) = layer(batch_images([image, photograph(128, 128, 1)]))
    batched = batched[0].reshape(rows, columns, -1)[:16, :24].flatten(0, 1)
    torch.testing.assert_close(batched, alone[0], rtol=1e-4, atol=1e-4)


def test_stock_checkpoint_loads_through_init_cfg(tmp_path):
    arch = dict(embed_dims=48, num_layers=1, num_heads=3, feedforward_channels=96)
    cfg = dict(type='mmpretrain.VisionTransformer', arch=arch, img_size=64)
    stock = build_stock(cfg)
    torch.save(stock.state_dict(), tmp_path / 'stock.pth')
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'stock.pth'))
    backbone = CondTok(cfg | dict(init_cfg=pretrained), conditioner=dict())
    backbone.init_weights()
    backbone.eval()
    backbone.conditioner.strength = 0
    image = photograph(64, 64)[None]
    assert_equal(run_seeded(backbone, image), run_seeded(stock, image))


DETECTOR = """
_base_ = ['mmdet::{base}']
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type='CondTok',
        backbone={backbone},
        conditioner=dict(floor=0.1)),
    neck=dict(in_channels={channels}))
"""


def load_detector(folder, base, backbone, channels):
    text = DETECTOR.format(base=base, backbone=backbone, channels=channels)
    (folder / 'detector.py').write_text(text)
    return Config.fromfile(folder / 'detector.py').model


def test_mask_rcnn_of_mmdet_computes_a_loss(tmp_path):
    channels = [16, 32, 80, 128]
    cfg = load_detector(
        tmp_path, 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', PVT, channels
    )
    cfg.train_cfg.rpn_proposal.max_per_img = 16
    with DefaultScope.overwrite_default_scope('mmdet'):
        detector = MODELS.build(cfg)
        assert type(detector.backbone) is PyramidVisionTransformer
        inputs = demo_mm_inputs(2, [(3, 96, 64), (3, 64, 96)], with_mask=True)
        batch = detector.data_preprocessor(inputs, training=True)
        losses = detector(**batch, mode='loss')
    loss, values = detector.parse_losses(losses)
    assert loss.isfinite()
    assert values['loss_mask'] > 0
    loss.backward()
    for parameter in detector.backbone.layers[0][0].parameters():
        assert parameter.grad.any()


def test_a_pvt_config_of_mmdet_is_wrapped_by_its_base(tmp_path):
    cfg = load_detector(
        tmp_path,
        'pvt/retinanet_pvt-t_fpn_1x_coco.py',
        '_base_.model.backbone',
        '_base_.model.neck.in_channels',
    )
    with DefaultScope.overwrite_default_scope('mmdet'):
        backbone = MODELS.build(cfg.backbone)
    assert type(backbone) is PyramidVisionTransformer
    assert conditioned_layer(backbone) is backbone.layers[0][0]
    assert len(backbone.layers[3][1]) == 1 + 2
    assert 'checkpoint' in backbone.init_cfg


LAZY = """
from condtok_mm.models import CondTok
from mmdet.models import PyramidVisionTransformer

backbone = dict(
    type=CondTok,
    backbone=dict(
        type=PyramidVisionTransformer, embed_dims=16, num_layers=[1, 1, 1, 1]),
    conditioner=dict(floor=0.1))
"""


def test_config_of_imported_classes(tmp_path):
    (tmp_path / 'lazy.py').write_text(LAZY)
    cfg = Config.fromfile(tmp_path / 'lazy.py', lazy_import=True)
    backbone = MODELS.build(cfg.backbone)
    assert type(backbone) is PyramidVisionTransformer
    assert backbone.conditioner.floor == 0.1


def test_a_row_of_the_table(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), pixels)
    image = load_square(tmp_path / 'image.png')
    resized = cv2.resize(pixels, (224, 224))[..., ::-1].astype(np.float32)
    np.testing.assert_allclose(
        image[0].permute(1, 2, 0).numpy(), (resized - MEAN) / STD, atol=1e-5
    )
    report = measure_wrapped(WRAPPED[0], image, 'image.png')
    assert (report.library, report.backbone) == ('mmdet', 'PyramidVisionTransformer')
    assert (report.embed, report.image) == ('layers.0.0', 'image.png')
    assert report.off_is_stock
    assert (report.num_tokens, report.channels) == (56 * 56, 64)
    assert report.rank <= 64
    assert report.kappa_before > report.kappa_floor > 1
    assert report.kappa_exact <= 2.02
    (tmp_path / 'text.jpg').write_text('no image')
    with pytest.raises(OSError, match='is not an image'):
        load_square(tmp_path / 'text.jpg')
