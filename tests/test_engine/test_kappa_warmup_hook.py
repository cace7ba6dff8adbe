import itertools
import json
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import nn

from condtok_mm.engine import KappaWarmupHook
from condtok_mm.engine.hooks.kappa_warmup_hook import META_KEY
from condtok_mm.models import CondTokViT

ARCH = dict(embed_dims=8, num_layers=1, num_heads=2)
BATCHES = 3
NUMBERS = itertools.count()
WARMUP = dict(type='KappaWarmupHook', end=2)
NO_TRAINING = dict(train_dataloader=None, train_cfg=None, optim_wrapper=None)


class Shapes(torch.utils.data.Dataset):
    """Twice BATCHES images of noise and their labels."""

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return dict(
            inputs=torch.randn(3, 16, 16, generator=generator), labels=index % 3
        )


class Classifier(BaseModel):
    def __init__(self, conditioner):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = CondTokViT(
            ARCH, img_size=16, patch_size=4, conditioner=conditioner
        )
        self.head = nn.Linear(8, 3)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(inputs)[-1].mean((2, 3)))
        if mode == 'loss':
            return dict(loss=F.cross_entropy(logits, labels))
        return list(logits)


class Logits(BaseMetric):
    """Keeps what each evaluation was given; tells the number of images."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        self.seen.append(torch.stack(results))
        return dict(images=len(results))


class Watch(Hook):
    """Notes the strengths of the iterations and evaluations, and can stop a run."""

    priority = 'VERY_LOW'

    def __init__(self, stop=None):
        self.stop = stop
        self.train, self.val, self.averaged = [], [], []
        self.first_loss = None

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.stop:
            raise KeyboardInterrupt
        self.train.append(strength(runner.model))
        for hook in runner.hooks:
            if hasattr(hook, 'ema_model'):
                self.averaged.append(strength(hook.ema_model))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 0:
            self.first_loss = outputs['loss'].item()

    def before_val_epoch(self, runner):
        self.val.append(strength(runner.model))


def strength(model):
    return next((m.strength for m in model.modules() if hasattr(m, 'strength')), None)


def make_runner(folder, *hooks, conditioner=dict(floor=0.1), iters=None, **kwargs):
    loop = dict(by_epoch=True, max_epochs=4, val_interval=1)
    if iters is not None:
        loop = dict(by_epoch=False, max_iters=iters, val_interval=iters)
    sampler = 'InfiniteSampler' if iters else 'DefaultSampler'
    train = dict(
        dataset=Shapes(),
        batch_size=2,
        sampler=dict(type=sampler, shuffle=True),
        collate_fn=dict(type='default_collate'),
    )
    val = dict(train, sampler=dict(type='DefaultSampler', shuffle=False))
    checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=iters is None)
    settings = dict(
        model=Classifier(conditioner),
        work_dir=str(folder),
        train_dataloader=train,
        train_cfg=loop,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
        val_dataloader=val,
        val_cfg=dict(),
        val_evaluator=[Logits()],
        test_dataloader=val,
        test_cfg=dict(),
        test_evaluator=[Logits()],
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=1), checkpoint=checkpoint
        ),
        custom_hooks=[WARMUP],
        randomness=dict(seed=0),
        experiment_name=f'warmup{next(NUMBERS)}',
    )
    settings.update(kwargs)
    settings['custom_hooks'] = [*settings['custom_hooks'], *hooks]
    return Runner(**settings)


def logged(folder):
    """Strength and loss of each iteration, as the JSON log of a run's folder has it."""
    lines = [
        json.loads(line)
        for path in sorted(folder.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    return [
        (line['iter'], line['conditioner_strength'], line['loss'])
        for line in lines
        if 'loss' in line
    ]


def test_strength_of_every_iteration_and_evaluation(tmp_path):
    watch = Watch()
    runner = make_runner(tmp_path, watch)
    runner.train()
    ramp = [n / (2 * BATCHES) for n in range(2 * BATCHES)]
    assert watch.train == ramp + [1.0] * 2 * BATCHES
    assert watch.val == [0.5, 1.0, 1.0, 1.0]
    assert [row[1] for row in logged(tmp_path)] == watch.train
    assert not [key for key in runner.model.state_dict() if 'strength' in key]


@pytest.mark.parametrize('by_epoch', [True, False])
def test_begins_late_and_counts_in_iterations(tmp_path, by_epoch):
    unit = 1 if by_epoch else BATCHES
    hook = KappaWarmupHook(end=3 * unit, begin=unit, by_epoch=by_epoch)
    watch = Watch()
    make_runner(tmp_path, watch, custom_hooks=[hook]).train()
    ramp = [n / (2 * BATCHES) for n in range(2 * BATCHES)]
    assert watch.train == [0.0] * BATCHES + ramp + [1.0] * BATCHES


def test_first_iteration_is_stock_and_validation_is_conditioned(tmp_path):
    losses = []
    for name, conditioner in (('off', None), ('on', dict(floor=0.1))):
        watch = Watch()
        make_runner(tmp_path / name, watch, conditioner=conditioner).train()
        losses.append(watch.first_loss)
    assert losses[0] == losses[1]

    runner = make_runner(tmp_path / 'half', custom_hooks=[KappaWarmupHook(end=8)])
    runner.train()
    seen = runner.val_evaluator.metrics[0].seen[-1]
    data = [Shapes()[index] for index in range(len(Shapes()))]
    inputs = torch.stack([item['inputs'] for item in data])
    labels = torch.tensor([item['labels'] for item in data])
    model = runner.model.eval()
    outputs = {}
    for value in (0.5, 1.0):
        model.backbone.conditioner.strength = value
        with torch.no_grad():
            outputs[value] = torch.stack(model(inputs, labels))
    torch.testing.assert_close(seen, outputs[0.5])
    assert (seen - outputs[1.0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ('loop', 'stop', 'hook'),
    [
        (dict(), 2 * BATCHES, dict(WARMUP, end=3)),
        (dict(iters=9), 4, dict(WARMUP, end=7, by_epoch=False)),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(tmp_path, loop, stop, hook):
    whole = make_runner(tmp_path / 'whole', custom_hooks=[hook], **loop)
    whole.train()
    broken = make_runner(tmp_path / 'broken', Watch(stop), custom_hooks=[hook], **loop)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.visualizer.close()
    watch = Watch()
    resumed = make_runner(
        tmp_path / 'broken', watch, custom_hooks=[hook], resume=True, **loop
    )
    resumed.train()
    assert 0 < watch.train[0] < 1
    rows = logged(tmp_path / 'whole')
    assert len(rows) == (9 if loop else 4 * BATCHES)
    assert logged(tmp_path / 'broken') == rows
    weights = resumed.model.state_dict()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize('priority', ['VERY_HIGH', 'VERY_LOW'])
def test_averaged_copy_follows(tmp_path, priority):
    watch = Watch()
    make_runner(
        tmp_path, watch, custom_hooks=[WARMUP, dict(type='EMAHook', priority=priority)]
    ).train()
    assert watch.averaged == watch.train
    assert len(set(watch.averaged)) == 2 * BATCHES + 1


def test_checkpoint_is_tested_with_its_strength(tmp_path):
    trained = make_runner(tmp_path / 'run', custom_hooks=[WARMUP, dict(type='EMAHook')])
    trained.train()
    evaluated = trained.val_evaluator.metrics[0].seen
    for epoch, expected in ((1, 0.5), (2, 1.0)):
        path = tmp_path / 'run' / f'epoch_{epoch}.pth'
        assert torch.load(path, weights_only=False)['meta'][META_KEY] == expected
        for train in (dict(), NO_TRAINING):
            runner = make_runner(tmp_path / 'test', load_from=str(path), **train)
            runner.test()
            assert strength(runner.model) == expected
            seen = runner.test_evaluator.metrics[0].seen[0]
            assert torch.equal(seen, evaluated[epoch - 1])


def test_checkpoint_without_a_note_is_tested_with_all(tmp_path):
    torch.save(Classifier(None).state_dict(), tmp_path / 'plain.pth')
    runner = make_runner(tmp_path, load_from=str(tmp_path / 'plain.pth'))
    runner.model.backbone.conditioner.strength = 0.25
    runner.test()
    assert strength(runner.model) == 1.0


def test_a_run_is_warned_of_another_strength_unless_it_has_the_hook(tmp_path):
    make_runner(tmp_path / 'run').train()
    path = str(tmp_path / 'run/epoch_1.pth')
    hooks = [dict(type='EMAHook', priority='VERY_HIGH'), WARMUP]
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='the weights were saved')
        make_runner(tmp_path / 'test', custom_hooks=hooks, load_from=path).test()
        make_runner(tmp_path / 'train', custom_hooks=hooks, load_from=path).train()
    runner = make_runner(tmp_path / 'plain', custom_hooks=[], load_from=path)
    with pytest.warns(UserWarning, match=r'at conditioner strength 0\.5, but run at 1'):
        runner.test()


def test_model_without_conditioner_is_named_once(tmp_path):
    runner = make_runner(tmp_path, conditioner=None)
    runner.train()
    words = 'the model has no conditioner, nothing to warm up'
    (log,) = tmp_path.glob('*/*.log')
    assert log.read_text().count(words) == 1
    assert 'train/conditioner_strength' not in runner.message_hub.log_scalars
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=False)
    assert META_KEY not in saved['meta']


def test_epochs_are_refused_in_an_iteration_loop(tmp_path):
    runner = make_runner(tmp_path, iters=4)
    with pytest.raises(ValueError, match=r'IterBasedTrainLoop.*by_epoch=False'):
        runner.train()


@pytest.mark.parametrize(
    ('arguments', 'error', 'words'),
    [
        (dict(end=0), ValueError, 'begin=0 and end=0'),
        (dict(end=2, begin=2), ValueError, 'begin=2 and end=2'),
        (dict(end=2, begin=-1), ValueError, 'begin=-1 and end=2'),
        (dict(end='2'), TypeError, "end must be a whole number.*'2'"),
        (dict(end=True), TypeError, 'end must be a whole number.*True'),
        (dict(end=2, begin=0.5), TypeError, 'begin must be a whole number.*0.5'),
        (dict(end=2, by_epoch=1), TypeError, 'by_epoch must be True or False.*1'),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        KappaWarmupHook(**arguments)


def train_in_process(rank, folder):
    """One of two processes: trains, and writes the strengths that it saw."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2')
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=2
    )
    watch = Watch()
    model = MMDistributedDataParallel(Classifier(dict(floor=0.1)))
    runner = make_runner(folder, watch, launcher='pytorch', model=model)
    runner.train()
    assert runner.model is model
    (folder / f'{rank}.json').write_text(json.dumps([watch.train, watch.val]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_see_the_same(tmp_path):
    torch.multiprocessing.spawn(train_in_process, (tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f'{n}.json').read_text()) for n in (0, 1))
    assert first == second
    # Two of the batches are left to each process.
    assert first == [[0.0, 0.25, 0.5, 0.75, *[1.0] * 4], [0.5, 1.0, 1.0, 1.0]]
