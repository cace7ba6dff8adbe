import copy
import itertools
import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import nn
from torch.utils.checkpoint import checkpoint

from condtok_mm.conditioning import TokenConditioner, attach_conditioner
from condtok_mm.engine import ConditionNumberHook
from condtok_mm.models import (
    CondTok,
    CondTokSwinTransformer,
    CondTokViT,
    CondTokXCiT,
)

from ..conftest import photograph, randomise, reference

SIZE = 64
USED = (40, 48)
"""Rows and columns of an image; the rest of the square is padding."""
BATCHES = 3
FLOOR = dict(kappa=3.0, floor=0.1)
EXACT = dict(kappa=2.0)
NUMBERS = itertools.count()
SCALARS = (
    'token_kappa',
    'token_kappa_max',
    'token_rank',
    'token_kappa_conditioned',
    'token_norm_growth',
)


class Photographs(torch.utils.data.Dataset):
    """Twice BATCHES padded images, grainy, so that fp32 resolves every direction."""

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        image = torch.zeros(3, SIZE, SIZE)
        generator = torch.Generator().manual_seed(index)
        grain = 0.05 * torch.randn(3, *USED, generator=generator)
        image[:, : USED[0], : USED[1]] = photograph(*USED, seed=index) + grain
        return dict(inputs=image)


class Dark(Photographs):
    """The same, but the odd ones are padding only."""

    def __getitem__(self, index):
        data = super().__getitem__(index)
        return dict(inputs=data['inputs'] * (index % 2 == 0))


class Stem(nn.Module):
    """Embeds with batch statistics and with noise: what a second pass must not touch.

    Returns features (B, 16, 8, 8).
    """

    def __init__(self, conditioner):
        super().__init__()
        self.patch_embed = nn.Sequential(
            nn.Conv2d(3, 16, 8, 8), nn.BatchNorm2d(16), nn.Dropout(0.1)
        )
        if conditioner is not None:
            attach_conditioner(self, TokenConditioner(**conditioner))

    def forward(self, images):
        return [self.patch_embed(images)]


def vit(conditioner, **kwargs):
    arch = dict(embed_dims=16, num_layers=2, num_heads=2)
    return CondTokViT(
        arch, img_size=SIZE, patch_size=8, conditioner=conditioner, **kwargs
    )


def swin(conditioner):
    return CondTokSwinTransformer(
        embed_dims=64,
        depths=(1, 1),
        num_heads=(1, 2),
        strides=(4, 2),
        out_indices=(0, 1),
        conditioner=conditioner,
    )


def xcit(conditioner):
    arch = dict(embed_dims=32, depth=4, num_heads=2, layer_scale_init_value=1.0)
    model = CondTokXCiT(
        arch, patch_size=16, out_indices=(0, 1, 2, 3), conditioner=conditioner
    )
    return randomise(model)


def pvt(conditioner):
    stock = dict(
        type='PyramidVisionTransformer', embed_dims=16, num_layers=[1, 1, 1, 1]
    )
    return CondTok(stock, conditioner=conditioner)


class Model(BaseModel):
    """Loss on what a backbone returns, in bf16 and recomputed if asked for."""

    def __init__(self, backbone, amp, recompute):
        super().__init__()
        self.backbone = backbone
        self.amp = amp
        self.recompute = recompute

    def forward(self, inputs, mode='tensor'):
        autocast = torch.autocast('cpu', torch.bfloat16) if self.amp else nullcontext()
        with autocast:
            if self.recompute:
                outs = checkpoint(self.backbone, inputs, use_reentrant=False)
            else:
                outs = self.backbone(inputs)
            return dict(loss=sum(out.float().sigmoid().mean() for out in outs))


def make_model(build, conditioner, amp=False, recompute=False, **kwargs):
    """A model with the weights of seed 0."""
    torch.manual_seed(0)
    return Model(build(conditioner, **kwargs), amp, recompute)


class Watch(Hook):
    """Keeps each batch with the embedding that it meets, and can stop a run."""

    priority = 'HIGH'

    def __init__(self, layer=None, stop=None):
        self.layer = layer
        self.stop = stop
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.stop:
            raise KeyboardInterrupt
        if self.layer is not None:
            layer = runner.model.backbone.get_submodule(self.layer)
            self.seen.append((data_batch['inputs'], stock_copy(layer)))


def stock_copy(layer):
    """The layer without a conditioner."""
    forward = vars(layer).pop('forward', None)
    copied = copy.deepcopy(layer)
    if forward is not None:
        layer.forward = forward
    return copied


def make_runner(folder, model, *hooks, interval=2, by_epoch=True, **kwargs):
    torch.manual_seed(1)
    loop = dict(by_epoch=True, max_epochs=2)
    if not by_epoch:
        loop = dict(by_epoch=False, max_iters=2 * BATCHES)
    if interval is not None:
        hooks = (dict(type='ConditionNumberHook', interval=interval), *hooks)
    settings = dict(
        model=model,
        work_dir=str(folder),
        train_dataloader=dict(
            dataset=Photographs(),
            batch_size=2,
            sampler=dict(
                type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True
            ),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=loop,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01, momentum=0.9)),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=1),
            checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=by_epoch),
        ),
        custom_hooks=list(hooks),
        randomness=dict(seed=0),
        experiment_name=f'kappa{next(NUMBERS)}',
    )
    return Runner(**settings | kwargs)


def logged(folder):
    """Lines of the JSON log of a run's folder, less the times."""
    lines = [
        json.loads(line)
        for path in sorted(folder.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    return [{k: v for k, v in line.items() if 'time' not in k} for line in lines]


def scalars(line):
    return {name: line[name] for name in SCALARS if name in line}


def by_numpy(images, layer, stride, conditioner):
    """The scalars by their definitions, from float64 singular values."""
    with torch.no_grad():
        output = layer(images)
    output = output[0] if isinstance(output, tuple) else output
    if output.dim() == 4:
        output = output.flatten(2).mT
    side = SIZE // stride
    grid = output.unflatten(1, (side, side)).double().numpy()
    rows, columns = (-(-pixels // stride) for pixels in USED)
    found = []
    for tokens in grid[:, :rows, :columns]:
        X = tokens.reshape(rows * columns, -1)
        values = np.linalg.svd(X, compute_uv=False)
        rank = int((values > 4.8e-7 * values[0]).sum())
        row = [values[0] / values[rank - 1], values[0] / values[rank - 1], rank]
        if conditioner is not None:
            Y = reference(X, **conditioner)
            after = np.linalg.svd(Y, compute_uv=False)
            row += [
                after[0] / after[rank - 1],
                np.linalg.norm(Y) / np.linalg.norm(X),
            ]
        found.append(row)
    found = np.array(found)
    means = dict(zip(SCALARS, found.mean(0), strict=False))
    return means | dict(token_kappa_max=found[:, 1].max())


@pytest.mark.parametrize('amp', [False, True])
@pytest.mark.parametrize('conditioner', [None, FLOOR, EXACT])
@pytest.mark.parametrize(
    ('build', 'layer', 'stride'),
    [
        (vit, 'patch_embed', 8),
        (swin, 'patch_embed', 4),
        (xcit, 'patch_embed', 16),
        (pvt, 'layers.0.0', 4),
    ],
)
def test_logged_values_are_those_of_numpy(
    tmp_path, build, layer, stride, conditioner, amp
):
    watch = Watch(layer)
    model = make_model(build, conditioner, amp)
    make_runner(tmp_path, model, watch, interval=1).train()
    lines = logged(tmp_path)
    assert [line['iter'] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, (images, embed) in zip(lines, watch.seen, strict=True):
        expected = by_numpy(images, embed, stride, conditioner)
        actual = scalars(line)
        if conditioner:
            # X + C is kept in fp32: its smallest singular value is not known better.
            after = expected.pop('token_kappa_conditioned')
            tolerance = max(1e-3, 1e-7 * after)
            assert actual.pop('token_kappa_conditioned') == pytest.approx(
                after, rel=tolerance
            )
        assert actual == pytest.approx(expected, rel=1e-3)
    assert len({line['token_kappa'] for line in lines}) == 6


@pytest.mark.parametrize(
    ('build', 'conditioner', 'settings', 'accumulate'),
    [
        (vit, FLOOR, dict(amp=True, drop_path_rate=0.2), 1),
        (vit, None, dict(amp=True, drop_path_rate=0.2), 1),
        (vit, FLOOR, dict(recompute=True), 1),
        (xcit, FLOOR, dict(), 2),
        (xcit, None, dict(recompute=True), 1),
        (pvt, None, dict(), 2),
        (Stem, None, dict(amp=True), 1),
        (Stem, FLOOR, dict(), 1),
    ],
)
def test_training_is_the_same_to_the_last_bit(
    tmp_path, build, conditioner, settings, accumulate
):
    optim = dict(
        optimizer=dict(type='SGD', lr=0.1, momentum=0.9),
        accumulative_counts=accumulate,
    )
    ends = []
    for interval in (None, 1):
        model = make_model(build, conditioner, **settings)
        folder = tmp_path / str(interval)
        make_runner(folder, model, interval=interval, optim_wrapper=optim).train()
        watched = [m for m in model.modules() if m._forward_hooks]
        assert not watched
        losses = [line['loss'] for line in logged(folder)]
        ends.append((losses, torch.get_rng_state(), model.state_dict()))
    assert 'token_kappa' in logged(tmp_path / '1')[0]
    (losses, state, weights), (other_losses, other_state, other_weights) = ends
    assert losses == other_losses
    assert torch.equal(state, other_state)
    assert len(set(losses)) == 2 * BATCHES
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]), name


def test_counts_as_the_logger_does_and_repeats_between(tmp_path):
    make_runner(tmp_path / 'two', make_model(vit, FLOOR)).train()
    lines = [scalars(line) for line in logged(tmp_path / 'two')]
    assert lines[0] == {}
    assert lines[1] == lines[2] == lines[3] != lines[4] == lines[5]
    assert set(lines[1]) == set(SCALARS)

    make_runner(tmp_path / 'fifty', make_model(vit, FLOOR), interval=50).train()
    lines = [scalars(line) for line in logged(tmp_path / 'fifty')]
    assert lines[1] == {}
    assert lines[2] == lines[3] == lines[4] != lines[5]

    runner = make_runner(tmp_path / 'iters', make_model(vit, FLOOR), by_epoch=False)
    runner.train()
    lines = [scalars(line) for line in logged(tmp_path / 'iters')]
    assert lines[1] == lines[2] != lines[3] == lines[4] != lines[5]


def test_resumed_run_logs_what_the_uninterrupted_one_does(tmp_path):
    make_runner(tmp_path / 'whole', make_model(vit, FLOOR)).train()
    broken = make_runner(
        tmp_path / 'broken', make_model(vit, FLOOR), Watch(stop=BATCHES)
    )
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.visualizer.close()
    make_runner(tmp_path / 'broken', make_model(vit, FLOOR), resume=True).train()
    assert logged(tmp_path / 'broken') == logged(tmp_path / 'whole')


def test_warm_up_is_seen(tmp_path):
    warmup = dict(type='KappaWarmupHook', begin=3, end=6, by_epoch=False)
    make_runner(tmp_path, make_model(vit, FLOOR, amp=True), warmup, interval=1).train()
    lines = logged(tmp_path)
    for line in lines[:4]:
        assert line['token_kappa_conditioned'] == line['token_kappa']
        assert line['token_norm_growth'] == 1
    grown = [line['token_norm_growth'] for line in lines[3:]]
    assert grown == sorted(grown)
    assert grown[-1] > 1.2
    assert lines[-1]['token_kappa_conditioned'] < lines[-1]['token_kappa'] / 2


def test_images_without_a_token_are_left_out(tmp_path):
    for name, dataset in (('light', Photographs()), ('dark', Dark())):
        loader = dict(
            dataset=dataset,
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        )
        model = make_model(vit, FLOOR)
        make_runner(tmp_path / name, model, train_dataloader=loader, interval=1).train()
    light, dark = (logged(tmp_path / name)[0] for name in ('light', 'dark'))
    assert all(math.isfinite(value) for value in scalars(dark).values())
    assert dark['token_kappa'] == pytest.approx(dark['token_kappa_max'], rel=1e-12)
    assert light['token_kappa'] != dark['token_kappa']


def test_wrapped_model_is_measured(tmp_path):
    make_runner(tmp_path / 'alone', make_model(vit, FLOOR)).train()
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/rendezvous', rank=0, world_size=1
    )
    try:
        model = MMDistributedDataParallel(make_model(vit, FLOOR))
        make_runner(tmp_path / 'wrapped', model).train()
    finally:
        torch.distributed.destroy_process_group()
    assert logged(tmp_path / 'wrapped') == logged(tmp_path / 'alone')


def test_layer_that_is_named_is_measured(tmp_path):
    class Plain(Stem):
        def __init__(self, conditioner):
            super().__init__(conditioner)
            self.first = self._modules.pop('patch_embed')

        def forward(self, images):
            return [self.first(images)]

    runner = make_runner(tmp_path / 'found', make_model(Plain, None))
    with pytest.raises(ValueError, match=r'Plain has no patch embedding.*set embed'):
        runner.train()
    hook = ConditionNumberHook(interval=1, embed='first', pad_value=None)
    make_runner(
        tmp_path / 'named', make_model(Plain, None), hook, interval=None
    ).train()
    assert set(scalars(logged(tmp_path / 'named')[0])) == set(SCALARS[:3])
    hook = ConditionNumberHook(embed='last')
    runner = make_runner(
        tmp_path / 'wrong', make_model(Plain, None), hook, interval=None
    )
    with pytest.raises(ValueError, match=r"no layer 'last' to measure.*: first\."):
        runner.train()


@pytest.mark.parametrize(
    ('interval', 'error', 'words'),
    [
        (0, ValueError, 'interval must be an integer >= 1, but got 0'),
        (2.0, TypeError, r'interval must be an integer.*2\.0'),
        (True, TypeError, 'interval must be an integer.*True'),
    ],
)
def test_bad_interval_is_named(interval, error, words):
    with pytest.raises(error, match=words):
        ConditionNumberHook(interval)


def test_compiled_model_is_named_and_not_watched(tmp_path):
    model = make_model(Stem, None)
    cfg = dict(compile=dict(backend='eager'))
    hook = ConditionNumberHook(interval=1)
    runner = make_runner(tmp_path, model, interval=None, cfg=cfg)
    hook.before_train(runner)
    (log,) = tmp_path.glob('*/*.log')
    assert log.read_text().count('compiled code cannot be watched') == 1
    hook.before_train_iter(runner, batch_idx=0)
    assert not [module for module in model.modules() if module._forward_hooks]
