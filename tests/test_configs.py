"""Every detector's config builds, trains and predicts; pairs differ by one key."""

from pathlib import Path

import pytest
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.structures import InstanceData
from mmengine.utils import to_2tuple

import condtok_mm

CONFIGS = Path(condtok_mm.CONFIGS)
ALL = sorted(
    path
    for path in CONFIGS.glob('*/*.py')
    if path.parent.name not in ('_base_', 'pretrain')
)
CONDITIONED = [path for path in ALL if '-condtok' in path.name]
IDS = [str(path.relative_to(CONFIGS)) for path in ALL]


def load(path):
    """The config, with nothing to download and few regions, for the CPU."""
    cfg = Config.fromfile(path)
    cfg.model.backbone.init_cfg = None
    cfg.model.data_preprocessor.pad_size_divisor = min(
        cfg.model.data_preprocessor.pad_size_divisor, 32
    )
    cfg.model.train_cfg.rpn_proposal.max_per_img = 24
    cfg.model.test_cfg.rpn.max_per_img = 8
    return cfg


def sample(height, width, num_classes):
    instances = InstanceData(
        bboxes=torch.tensor([[4.0, 6.0, 40.0, 50.0], [20.0, 8.0, 60.0, 30.0]]),
        labels=torch.tensor([0, num_classes - 1]),
    )
    masks = torch.zeros(2, height, width, dtype=torch.uint8)
    for mask, box in zip(masks, instances.bboxes.int().tolist(), strict=True):
        mask[box[1] : box[3], box[0] : box[2]] = 1
    instances.masks = BitmapMasks(masks.numpy(), height, width)
    shape = (height, width)
    meta = dict(img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0), img_id=0)
    return DetDataSample(metainfo=meta, gt_instances=instances)


@pytest.mark.parametrize('path', ALL, ids=IDS)
def test_builds_and_runs(path):
    register_all_modules()
    cfg = load(path)
    model = MODELS.build(cfg.model)
    head = cfg.model.roi_head.mask_head
    sizes = [(64, 96), (80, 64)]
    data = dict(
        inputs=[torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes],
        data_samples=[sample(*size, head.num_classes) for size in sizes],
    )
    model.train()
    batch = model.data_preprocessor(data, training=True)
    losses = model(**batch, mode='loss')
    values = [sum(v) if isinstance(v, list) else v for v in losses.values()]
    assert len(values) >= 5
    assert all(value.isfinite().all() for value in values)
    sum(value.sum() for name, value in losses.items() if 'mask' in name).backward()
    for parameter in model.backbone.patch_embed.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()
    model.eval()
    with torch.no_grad():
        batch = model.data_preprocessor(data, training=False)
        results = model(**batch, mode='predict')
    for result, size in zip(results, sizes, strict=True):
        predicted = result.pred_instances
        assert predicted.masks.shape == (len(predicted.bboxes), *size)


@pytest.mark.parametrize('path', CONDITIONED, ids=lambda path: path.stem)
def test_conditioned_config_changes_its_twin_by_one_key(path):
    twin = path.with_name(
        path.name.replace('-condtok-exact', '').replace('-condtok', '')
    )
    assert f"_base_ = './{twin.name}'" in path.read_text()
    conditioned, baseline = Config.fromfile(path), Config.fromfile(twin)
    floor = 0.0 if '-exact' in path.name else 0.1
    backbone = conditioned.model.backbone
    assert backbone.pop('conditioner') == dict(kappa=2.0, floor=floor)
    assert backbone.pop('type').startswith('CondTok')
    assert baseline.model.backbone.pop('type') in (
        'SwinTransformer',
        'CondTokViT',
        'CondTokXCiT',
    )
    assert 'condtok_mm' in conditioned.pop('custom_imports').imports
    baseline.pop('custom_imports', None)
    assert conditioned.to_dict() == baseline.to_dict()


def test_every_baseline_has_a_conditioned_config():
    for path in ALL:
        if path not in CONDITIONED:
            assert any(
                path.name == other.name.replace('-condtok', '') for other in CONDITIONED
            ), path


def test_every_main_config_has_the_papers_exact_correction_beside_it():
    for path in CONDITIONED:
        if path.parent.name != 'demo' and '-exact' not in path.name:
            name = path.name.replace('-condtok_', '-condtok-exact_')
            assert path.with_name(name).is_file(), path


@pytest.mark.parametrize('path', ALL, ids=IDS)
def test_batch_sizes_add_up(path):
    """auto_scale_lr works with mmdet's train.py, and knows the recipe's batch."""
    cfg = Config.fromfile(path)
    expected = 64 if 'vit-b' in path.name else 16
    if path.parent.name == 'demo':
        expected = cfg.train_dataloader.batch_size
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=expected)


def test_a_checkpoint_is_left_while_the_next_one_is_written():
    for path in [*ALL, *CONFIGS.glob('pretrain/*.py')]:
        if '-condtok' not in path.name:
            checkpoint = Config.fromfile(path).default_hooks.checkpoint
            assert checkpoint.get('max_keep_ckpts', -1) != 1, path


@pytest.mark.parametrize('path', ALL, ids=IDS)
def test_padding_of_the_config_is_the_conditioners(path):
    from condtok_mm.datasets.checks import padding_conflicts

    assert padding_conflicts(Config.fromfile(path), 0.0) == []


@pytest.mark.parametrize('path', ALL, ids=IDS)
def test_test_images_are_padded_to_whole_patches(path):
    cfg = Config.fromfile(path)
    divisor = cfg.model.data_preprocessor.pad_size_divisor
    patch = cfg.model.backbone.get('patch_size', 4)
    assert all(divisor % side == 0 for side in to_2tuple(patch))
