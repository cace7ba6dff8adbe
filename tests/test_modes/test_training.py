"""Ways to train: each gives what plain training of the same detector gives."""

import copy
import os

import pytest
import torch
from mmdet.models import MaskRCNN
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel, convert_sync_batchnorm
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from torch import nn

from condtok_mm.conditioning.attach import conditioned_layer
from condtok_mm.datasets import make_shapes

from ..conftest import relative_error
from .detectors import (
    NAMES,
    PIXELS,
    batch_norms,
    build,
    build_averaging,
    compute_loss,
    gradients,
    load,
    make_batch,
    part_of,
    set_up_run,
    weights,
)

SIZE = (PIXELS, PIXELS)
FROZEN = {
    'swin': (1, ('patch_embed.', 'stages.0.', 'norm0.')),
    'vit': (2, ('patch_embed.', 'pos_embed', 'layers.0.', 'layers.1.')),
    'xcit': (2, ('patch_embed.', 'pos_embed.', 'xca_layers.0.', 'xca_layers.1.')),
}
"""frozen_stages, and what they freeze."""

UNUSED = ('cls_token', 'ca_layers.', 'norm.')
"""What XCiT has for classification alone."""


def sgd(model, **kwargs):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.05
    )
    return OptimWrapper(optimizer, **kwargs)


@pytest.mark.parametrize('name', NAMES)
def test_gathered_batches_are_one_batch(name):
    batch = make_batch(SIZE, SIZE)
    whole = build_averaging(load(name))
    before = weights(whole)
    whole.train_step(batch, sgd(whole))
    gathered = build_averaging(load(name))
    optim_wrapper = sgd(gathered, accumulative_counts=2)
    gathered.train_step(part_of(batch, 0), optim_wrapper)
    assert torch.equal(weights(gathered), before)
    gathered.train_step(part_of(batch, 1), optim_wrapper)
    moved = weights(whole) - before
    assert relative_error(weights(gathered) - before, moved) < 1e-3
    halves = build_averaging(load(name))
    halves.train_step(part_of(batch, 0), sgd(halves))
    assert relative_error(weights(halves) - before, moved) > 0.1


@pytest.mark.parametrize('name', NAMES)
def test_recomputed_blocks_give_the_same_gradients(name):
    batch = make_batch((64, 48), (48, 64))
    found = []
    for with_cp in (False, True):
        model = build(load(name, with_cp=with_cp))
        loss = compute_loss(model, batch)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    (loss, plain), (again, recomputed) = found
    torch.testing.assert_close(again, loss)
    assert plain.keys() == recomputed.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(recomputed[key], gradient, msg=key)


@pytest.mark.parametrize('name', NAMES)
def test_frozen_stages_stay_as_they_are(name):
    stages, beginnings = FROZEN[name]
    model = build(load(name, frozen_stages=stages))
    before = copy.deepcopy(model.state_dict())
    optim_wrapper = sgd(model)
    for seed in range(2):
        model.train_step(make_batch(SIZE, SIZE, seed=seed), optim_wrapper)
    kept = (*beginnings, *(UNUSED if name == 'xcit' else ()))
    fixed = tuple(f'backbone.{beginning}' for beginning in kept)
    for key, value in model.state_dict().items():
        same = key.startswith(fixed) or key.endswith('relative_position_index')
        assert torch.equal(value, before[key]) == same, key


class HalfFeatures(MaskRCNN):
    """Computes features by autocast; on CPU mmcv's NMS has no half precision."""

    dtype = torch.float16

    def extract_feat(self, batch_inputs):
        with torch.autocast('cpu', dtype=self.dtype):
            features = super().extract_feat(batch_inputs)
        return tuple(feature.float() for feature in features)


class CpuAmpOptimWrapper(AmpOptimWrapper):
    """mmengine's, which is made for GPUs only, with a scaler for the CPU."""

    def __init__(self, optimizer, init_scale):
        OptimWrapper.__init__(self, optimizer, clip_grad=dict(max_norm=1.0))
        self.loss_scaler = torch.amp.GradScaler('cpu', init_scale=init_scale)
        self._scale_update_param = None

    def optim_context(self, model):
        return OptimWrapper.optim_context(self, model)


def build_half(name, dtype=torch.float16, **backbone):
    cfg = load(name, **backbone)
    cfg.model.type = HalfFeatures
    model = build(cfg)
    model.dtype = dtype
    return model


@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float16, 0.03), (torch.bfloat16, 0.15)]
)
@pytest.mark.parametrize('name', NAMES)
def test_half_precision_has_the_gradients_of_full(name, dtype, tolerance):
    batch = make_batch(SIZE, SIZE)
    found = []
    for each in (dtype, torch.float32):
        model = build_averaging(load(name))
        model.__class__, model.dtype = HalfFeatures, each
        (1024 * compute_loss(model, batch)).backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    half, full = (torch.cat([g.flatten() for g in each.values()]) for each in found)
    assert half.dtype == torch.float32
    assert relative_error(half, full) < tolerance


@pytest.mark.parametrize('cause', ['pixel', 'scale'])
@pytest.mark.parametrize('conditioner', [None, dict(floor=0.1)], ids=['off', 'on'])
@pytest.mark.parametrize('name', NAMES)
def test_overflow_skips_one_step(name, conditioner, cause):
    """An inf in one image, or a loss that is scaled by too much."""
    model = build_half(name, conditioner=conditioner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scale = 2.0**40 if cause == 'scale' else 2.0**10
    optim_wrapper = CpuAmpOptimWrapper(optimizer, scale)
    batch = make_batch(SIZE, SIZE)
    broken = copy.deepcopy(batch)
    if cause == 'pixel':
        broken['inputs'][0] = broken['inputs'][0].float()
        broken['inputs'][0][:, 20, 30] = torch.inf
        broken['inputs'][1] = broken['inputs'][1].float()
    before = weights(model)
    model.train_step(broken, optim_wrapper)
    assert torch.equal(weights(model), before)
    scaler = optim_wrapper.loss_scaler
    assert scaler.get_scale() == scale / 2
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert not any(value.any() for value in moments)
    scaler.update(2.0**10)
    losses = model.train_step(batch, optim_wrapper)
    assert losses['loss'].isfinite()
    after = weights(model)
    assert after.isfinite().all()
    assert not torch.equal(after, before)


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'shapes'
    make_shapes(folder, num_train=8, num_val=1, progress=False)
    return folder


class Average(Hook):
    """Averages the weights of a run as EMAHook is to do."""

    priority = 'VERY_HIGH'
    average = None

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        current = weights(runner.model)
        past = current if self.average is None else self.average
        self.average = (past + current) / 2


@pytest.mark.parametrize('name', NAMES)
def test_averaged_detector_is_conditioned_and_saved(name, shapes, tmp_path):
    cfg = set_up_run(load(name), shapes, tmp_path)
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.5)]
    runner = Runner.from_cfg(cfg)
    expected = Average()
    runner.register_hook(expected)
    runner.train()
    (hook,) = (hook for hook in runner.hooks if hasattr(hook, 'ema_model'))
    averaged = hook.ema_model.module
    torch.testing.assert_close(weights(averaged), expected.average)
    assert not torch.equal(weights(averaged), weights(runner.model))
    for mine, source in zip(averaged.buffers(), runner.model.buffers(), strict=True):
        assert torch.equal(mine, source)
        assert mine is not source
    assert averaged.backbone.conditioner is not runner.model.backbone.conditioner
    assert conditioned_layer(averaged.backbone) is averaged.backbone.patch_embed
    loaded = build(load(name)).eval()
    path = tmp_path / 'iter_3.pth'
    state = torch.load(path, weights_only=False)['state_dict']
    loaded.load_state_dict(state, strict=True)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        saved = loaded.backbone(images)
        features = averaged.eval().backbone(images)
        averaged.backbone.conditioner.strength = 0
        stock = averaged.backbone(images)
    for each, mine, off in zip(saved, features, stock, strict=True):
        assert torch.equal(each, mine)
        assert relative_error(mine, off) > 1e-3


def test_synchronised_batch_norms_keep_the_conditioner():
    """As ``sync_bn='torch'`` converts them; training with them over GPUs needs GPUs."""
    batch = make_batch((64, 48), (48, 64))
    plain = build(load('xcit'))
    keys = list(plain.state_dict())
    count = len(batch_norms(plain))
    compute_loss(plain, batch).backward()
    converted = convert_sync_batchnorm(build(load('xcit')), 'torch')
    norms = [m for m in converted.modules() if isinstance(m, nn.SyncBatchNorm)]
    assert len(norms) == count > 0
    assert not batch_norms(converted)
    assert list(converted.state_dict()) == keys
    backbone = converted.backbone
    assert conditioned_layer(backbone) is backbone.patch_embed
    assert backbone.patch_embed.forward.conditioner is backbone.conditioner
    compute_loss(converted, batch).backward()
    expected = gradients(plain)
    for key, gradient in gradients(converted).items():
        torch.testing.assert_close(gradient, expected[key], msg=key)
    for key, value in converted.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], msg=key)


class Valid:
    """Forward pre-hook of a conditioner that counts the tokens that hold image."""

    def __init__(self):
        self.counts = []

    def __call__(self, conditioner, inputs):
        self.counts += inputs[1].sum(1).tolist()


class Sizes(Hook):
    """Notes the sizes of the images, and the losses."""

    def __init__(self):
        self.sizes, self.losses = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.sizes += [each.img_shape for each in data_batch['data_samples']]
        self.losses.append(outputs['loss'].item())


@pytest.mark.parametrize('name', NAMES)
def test_every_scale_leaves_its_padding_out(name, shapes, tmp_path):
    cfg = set_up_run(load(name), shapes, tmp_path, iters=4)
    for transform in cfg.train_dataloader.dataset.pipeline:
        if transform.type == 'Resize':
            scales = [(40, 40), (64, 64), (104, 104)]
            transform.update(type='RandomChoiceResize', scales=scales)
            del transform['scale']
    cfg.randomness = dict(seed=0)
    runner = Runner.from_cfg(cfg)
    seen, valid = Sizes(), Valid()
    runner.register_hook(seen)
    runner.model.backbone.conditioner.register_forward_pre_hook(valid)
    runner.train()
    patch = {'swin': 4, 'vit': 8, 'xcit': 16}[name]
    assert len({max(size) for size in seen.sizes}) == 3
    grids = [(-(-height // patch), -(-width // patch)) for height, width in seen.sizes]
    assert valid.counts == [rows * columns for rows, columns in grids]
    assert all(0 < loss < 100 for loss in seen.losses)


BATCH = 4
SCENARIOS = ('plain', 'frozen and recomputed', 'gathered')


def train_twice(name, scenario, batches, wrap=lambda model: model):
    """Weights after two steps on the mean loss of some batches."""
    options = {}
    if scenario == 'frozen and recomputed':
        options = dict(frozen_stages=FROZEN[name][0], with_cp=True)
    model = build_averaging(load(name, **options))
    optim_wrapper = sgd(model, accumulative_counts=len(batches))
    wrapped = wrap(model)
    for _ in range(2):
        for batch in batches:
            wrapped.train_step(batch, optim_wrapper)
    return weights(model)


def train_in_process(rank, folder):
    """One of two processes: trains on its half of the batch, and writes its weights."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2')
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=2
    )
    found = {}
    with DefaultScope.overwrite_default_scope('mmdet'):
        half = part_of(make_batch(*[SIZE] * BATCH), rank * BATCH // 2, BATCH // 2)
        for name in NAMES:
            for scenario in SCENARIOS:
                batches = [half]
                if scenario == 'gathered':
                    batches = [part_of(half, index) for index in range(BATCH // 2)]
                found[name, scenario] = train_twice(
                    name, scenario, batches, MMDistributedDataParallel
                )
    torch.save(found, folder / f'{rank}.pth')
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope='module')
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp('processes')
    torch.multiprocessing.spawn(train_in_process, (folder,), nprocs=2)
    return [torch.load(folder / f'{rank}.pth') for rank in range(2)]


@pytest.mark.parametrize('scenario', SCENARIOS)
@pytest.mark.parametrize('name', NAMES)
def test_two_processes_are_one_with_the_joint_batch(two_processes, name, scenario):
    """Without find_unused_parameters, as by default."""
    first, second = (found[name, scenario] for found in two_processes)
    assert torch.equal(first, second)
    alone = train_twice(name, scenario, [make_batch(*[SIZE] * BATCH)])
    before = weights(build_averaging(load(name)))
    assert relative_error(first - before, alone - before) < 1e-3
