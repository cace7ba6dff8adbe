"""The classifiers: recipes, pairs, a real training step, and what detectors load."""

import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmpretrain.registry import MODELS

import condtok_mm
from condtok_mm.datasets import make_shapes

ROOT = Path(__file__).parents[1]
CONFIGS = Path(condtok_mm.CONFIGS)
ALL = sorted((CONFIGS / 'pretrain').glob('*.py'))
PAPER = [path for path in ALL if path.name.endswith('_in1k.py')]
BASELINES = [path for path in PAPER if '-condtok' not in path.name]
DEMO = CONFIGS / 'pretrain/vit-demo-condtok_1xb8_shapes.py'

# Backbones of one block per stage, and the width that the head sees.
VIT = dict(embed_dims=96, num_layers=1, num_heads=3, feedforward_channels=384)
STAGES = dict(embed_dims=32, depths=[1] * 4, num_heads=[1, 2, 4, 8])
SMALL = {
    'vit': (dict(arch=VIT), 96),
    'deit': (dict(arch=VIT), 96),
    'swin': (dict(arch=STAGES), 256),
    'xcit': (dict(embed_dims=64, depth=1, num_heads=2), 64),
    'davit': (dict(arch=STAGES), 256),
}

# Peak and last learning rate, weight decay, warm-up, epochs, gradient clipping, drop
# path, Mixup, CutMix, repeated augmentation.
RECIPES = {
    'vit-b': (3e-3, 0.0, 0.3, 30, 300, 1.0, 0.0, 0.2, None, False),
    'deit-b': (1e-3, 1e-5, 0.05, 5, 300, None, 0.1, 0.8, 1.0, True),
    'swin-b': (1e-3, 1e-5, 0.05, 20, 300, 5.0, 0.5, 0.8, 1.0, False),
    'xcit-m24': (1e-3, 1e-5, 0.05, 5, 400, None, 0.15, 0.8, 1.0, True),
    'davit-b': (1e-3, 1e-5, 0.05, 5, 300, 1.0, 0.4, 0.8, 1.0, False),
}


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Images of two classes, one folder each, two images in a folder."""
    root = tmp_path_factory.mktemp('images')
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        for name in ('a', 'b'):
            (root / split / name).mkdir(parents=True)
            for index in range(2):
                image = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
                assert cv2.imwrite(str(root / split / name / f'{index}.png'), image)
    return root


class Stop(Hook):
    """Ends the training after its first epoch."""

    def after_train_epoch(self, runner):
        runner.train_loop.stop_training = True


def make_runner(path, folders, work_dir):
    """The runner of a config: two images a batch, a small model, no checkpoints."""
    cfg = Config.fromfile(path)
    backbone = cfg.model.backbone
    if path in PAPER:
        settings, cfg.model.head.in_channels = SMALL[path.name.split('-')[0]]
        backbone.get('backbone', backbone).update(settings)
    loader = cfg.train_dataloader
    loader.batch_size = 2
    loader.num_workers = 0
    loader.dataset.data_root = str(folders)
    loader.dataset.metainfo = dict(classes=('a', 'b'))
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    cfg.test_dataloader = cfg.test_evaluator = cfg.test_cfg = None
    cfg.default_hooks.checkpoint = None
    cfg.randomness = dict(seed=0)
    cfg.work_dir = str(work_dir)
    cfg.experiment_name = f'{path.stem}_{work_dir.name}'
    return Runner.from_cfg(cfg)


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_trains(path, folders, tmp_path):
    """Two real steps, since heads that start at zero pass no gradient in the first."""
    runner = make_runner(path, folders, tmp_path)
    gradients, losses = [], []
    embedding = next(runner.model.backbone.patch_embed.parameters())
    embedding.register_hook(lambda grad: gradients.append(grad.clone()))

    class Record(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            losses.append(outputs['loss'])

    runner.register_hook(Record())
    runner.register_hook(Stop())
    runner.train()
    assert len(losses) == len(gradients) == 2
    assert all(loss.isfinite() for loss in losses)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1].any()
    conditioned = hasattr(runner.model.backbone, 'conditioner')
    assert conditioned == ('-condtok' in path.name)


@pytest.mark.parametrize('path', BASELINES, ids=lambda path: path.stem)
def test_recipe_is_the_published_one(path, folders, tmp_path):
    family = re.match('[a-z]+-[a-z0-9]+', path.name).group()
    peak, last, decay, warmup, epochs, clip, drop_path, mixup, cutmix, repeated = (
        RECIPES[family]
    )
    cfg = Config.fromfile(path)
    assert cfg.train_cfg.max_epochs == epochs
    assert (cfg.optim_wrapper.get('clip_grad') or {}).get('max_norm') == clip
    assert cfg.model.backbone.get('drop_path_rate', 0.0) == drop_path
    assert cfg.model.head.loss.type == 'LabelSmoothLoss'
    assert cfg.model.head.loss.label_smooth_val == 0.1
    augments = cfg.model.train_cfg.augments
    alphas = {
        augment.type: augment.alpha
        for augment in ([augments] if isinstance(augments, dict) else augments)
    }
    assert (alphas.get('Mixup'), alphas.get('CutMix')) == (mixup, cutmix)
    sampler = cfg.train_dataloader.sampler
    assert (sampler.type == 'RepeatAugSampler') == repeated
    assert sampler.shuffle
    erasing = [step for step in cfg.train_pipeline if step.type == 'RandomErasing']
    assert [step.erase_prob for step in erasing] == [0.25] * (family != 'vit-b')

    runner = make_runner(path, folders, tmp_path)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        runner.optim_wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
        per_epoch = len(runner.train_loop.dataloader)
        schedulers = runner.build_param_scheduler(cfg.param_scheduler)
    groups = runner.optim_wrapper.optimizer.param_groups
    assert {group['weight_decay'] for group in groups} == {0.0, decay}
    cls_token = getattr(runner.model.backbone, 'cls_token', None)
    for group in groups:
        if any(parameter is cls_token for parameter in group['params']):
            assert group['weight_decay'] == 0

    rates = []
    for step in range(epochs * per_epoch):
        rates.append(groups[0]['lr'])
        for scheduler in schedulers:
            if not scheduler.by_epoch or (step + 1) % per_epoch == 0:
                scheduler.step()
    assert rates[0] < 1e-6 + peak / 1000
    assert np.argmax(rates) == pytest.approx(warmup * per_epoch, abs=1)
    assert max(rates) == pytest.approx(peak)
    assert rates[-1] == pytest.approx(last, abs=peak / 1000)


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_batch_sizes_add_up(path):
    cfg = Config.fromfile(path)
    gpus, samples = map(int, re.search(r'_(\d+)xb(\d+)_', path.name).groups())
    assert cfg.train_dataloader.batch_size == samples
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=gpus * samples)


@pytest.mark.parametrize(
    'path', [p for p in PAPER if p not in BASELINES], ids=lambda path: path.stem
)
def test_conditioned_config_changes_the_backbone_only(path):
    twin = path.with_name(re.sub('-condtok(-exact)?', '', path.name))
    assert f"_base_ = './{twin.name}'" in path.read_text()
    conditioned, baseline = Config.fromfile(path), Config.fromfile(twin)
    floor = 0.0 if '-exact' in path.name else 0.1
    assert conditioned.model.pop('backbone') == dict(
        type='CondTok',
        backbone=baseline.model.pop('backbone'),
        conditioner=dict(kappa=2.0, floor=floor, pad_value=None),
    )
    assert conditioned.pop('custom_imports').imports == ['condtok_mm']
    assert conditioned.to_dict() == baseline.to_dict()


def test_five_classifiers_have_three_configs_each():
    assert len(BASELINES) == len(RECIPES) == 5
    for path in BASELINES:
        model, rest = path.name.split('_', 1)
        for kind in ('condtok', 'condtok-exact'):
            assert path.with_name(f'{model}-{kind}_{rest}') in PAPER


def test_weights_start_small_where_a_recipe_is_written_out(folders, tmp_path):
    """mmpretrain's XCiT draws them with a standard deviation of 1."""
    for name in ('xcit-m24-p16_8xb128_in1k', 'davit-b_8xb128_in1k'):
        path = CONFIGS / f'pretrain/{name}.py'
        model = make_runner(path, folders, tmp_path).model
        model.init_weights()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        weights = torch.cat([layer.weight.flatten() for layer in linear])
        # Half of a normal distribution lies within 0.6745 standard deviations.
        assert weights.abs().median().item() == pytest.approx(0.6745 * 0.02, rel=0.02)
        assert not any(layer.bias.any() for layer in linear)


def test_demo_classifier_has_the_backbone_of_the_demo_detector():
    detector = CONFIGS / 'demo/mask-rcnn_vit-demo-condtok_simple-fpn_shapes.py'
    expected = Config.fromfile(detector).model.backbone
    backbone = Config.fromfile(DEMO).model.backbone
    assert backbone.conditioner.pop('pad_value', 0) is None
    assert backbone == expected


TINY_VIT = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
TINY_SWIN = dict(depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8])
TINY_XCIT = dict(embed_dims=32, depth=6, num_heads=2)


@pytest.mark.parametrize(
    ('classifier', 'sizes', 'detector', 'detector_sizes', 'new'),
    [
        pytest.param(
            'vit-b-p16-condtok_64xb64_in1k',
            dict(arch=TINY_VIT),
            'vit-b-p16-mae-condtok_simple-fpn_amp-lsj-100e',
            dict(arch=TINY_VIT, img_size=224),
            r'layers\.\d\.attn\.rel_pos_[hw]',
            id='vit',
        ),
        pytest.param(
            'swin-b-p4-w7-condtok_16xb64_in1k',
            dict(arch=dict(embed_dims=32, **TINY_SWIN)),
            'swin-t-p4-w7-condtok_fpn_1x',
            dict(embed_dims=32, **TINY_SWIN),
            r'norm[012]\.(weight|bias)',
            id='swin',
        ),
        pytest.param(
            'xcit-m24-p16-condtok_8xb128_in1k',
            TINY_XCIT,
            'xcit-m24-p16-condtok_fpn_amp-ms-crop-3x',
            dict(arch=dict(layer_scale_init_value=1e-5, **TINY_XCIT)),
            r'levels\..*',
            id='xcit',
        ),
    ],
)
def test_detector_loads_the_classifiers_checkpoint(
    tmp_path, classifier, sizes, detector, detector_sizes, new
):
    cfg = Config.fromfile(CONFIGS / f'pretrain/{classifier}.py').model.backbone
    cfg.backbone.update(sizes)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        trained = MODELS.build(cfg).state_dict()
    checkpoint = tmp_path / 'epoch_1.pth'
    state = {f'backbone.{key}': value for key, value in trained.items()}
    torch.save(dict(state_dict=state, meta={}), checkpoint)

    cfg = Config.fromfile(CONFIGS / f'mask_rcnn/mask-rcnn_{detector}_coco.py')
    cfg = cfg.model.backbone
    cfg.update(detector_sizes)
    cfg.init_cfg = ConfigDict(type='Pretrained', checkpoint=str(checkpoint))
    with DefaultScope.overwrite_default_scope('mmdet'):
        backbone = MODELS.build(cfg)
    backbone.init_weights()
    loaded = backbone.state_dict()
    assert all(re.fullmatch(new, key) for key in set(loaded) - set(trained))
    common = set(loaded) & set(trained)
    assert len(common) > len(trained) / 2
    # The detector has no class token, and its positions are a map.
    trained['pos_embed'] = trained.get('pos_embed', torch.zeros(1, 1))[:, 1:]
    for key in common:
        assert torch.equal(loaded[key].flatten(), trained[key].flatten()), key


def run(folder, *command):
    """Run a python command in a folder, and return what it printed."""
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', *map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_tools_train_a_classifier_and_the_detector_that_begins_with_it(tmp_path):
    make_shapes(tmp_path / 'data/shapes', num_train=12, num_val=6, progress=False)
    crop = (ROOT / 'tools/dataset_converters/crop_objects.py', 'data/shapes')
    run(tmp_path, *crop, 'data/shape_crops')
    crops = len(list(tmp_path.glob('data/shape_crops/val/*/*.png')))
    train, test = (ROOT / 'tools' / name for name in ('train.py', 'test.py'))
    epochs = ['--cfg-options', 'train_cfg.val_interval=1']
    run(tmp_path, train, DEMO, '--work-dir', 'work', *epochs, 'train_cfg.max_epochs=1')
    assert (
        'accuracy/top1'
        in next(tmp_path.glob('work/2*/vis_data/scalars.json')).read_text()
    )
    options = [*epochs, 'train_cfg.max_epochs=2']
    log = run(tmp_path, train, DEMO, '--work-dir', 'work', '--resume', *options)
    assert 'Epoch(train) [2]' in log
    assert 'Epoch(train) [1]' not in log
    checkpoint = tmp_path / 'work/epoch_2.pth'
    log = run(tmp_path, test, DEMO, checkpoint, '--show-dir', 'pictures')
    assert 'accuracy/top1' in log
    assert len(list(tmp_path.rglob('pictures/**/*.png'))) == crops

    detector = CONFIGS / 'demo/mask-rcnn_vit-demo-condtok_simple-fpn_shapes.py'
    keys = torch.load(checkpoint, weights_only=False)['state_dict']
    keys = [key for key in keys if key.startswith('backbone.')]
    options = [
        '--cfg-options',
        'model.backbone.init_cfg.type=Pretrained',
        f'model.backbone.init_cfg.checkpoint={checkpoint}',
        'train_cfg.max_epochs=1',
        'default_hooks.logger.interval=1',
    ]
    log = run(tmp_path, train, detector, '--work-dir', 'detector', *options)
    assert f'{len(keys)} of {len(keys)}' in log
    losses = re.findall(r'Epoch\(train\).* loss: (\S+)', log)
    assert np.isfinite(np.array(losses, dtype=float)).all()
    log = run(tmp_path, test, detector, 'detector/epoch_1.pth')
    assert 'coco/segm_mAP' in log
    assert f'{len(keys)} of {len(keys)}' in log
