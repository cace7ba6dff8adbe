"""A run that is killed and resumed ends with the weights of one that was not."""

import os
import random
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmengine.dataset import InfiniteSampler
from mmengine.evaluator import BaseMetric
from mmengine.fileio import LocalBackend
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import nn

from condtok_mm.checkpoints import read_checkpoint
from condtok_mm.engine.hooks.random_state_hook import KEY
from condtok_mm.engine.resuming import is_whole, replacement_checkpoint

EPOCHS, BATCHES = 3, 5
ITERS = EPOCHS * BATCHES
HOOK = dict(type='RandomStateHook')


class Noise(torch.utils.data.Dataset):
    """Fixed rows, flipped, scaled and disturbed by every generator at each visit."""

    def __len__(self):
        return 2 * BATCHES * int(os.environ.get('WORLD_SIZE', '1'))

    def __getitem__(self, index):
        row = torch.linspace(0, 1, 4) * (index + 1)
        row = row.flip(0) if random.random() < 0.5 else row
        row = row * np.random.uniform(0.5, 1.5) + 0.1 * torch.randn(4)
        return dict(inputs=row.float(), labels=index % 2)


class Classifier(BaseModel):
    """Draws when it is built, in training and, unlike most, in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), DropPath(0.3))
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, labels, mode='tensor'):
        scale = random.random() + np.random.rand()
        logits = self.head(self.layers(inputs) + scale * torch.rand(8))
        return dict(loss=F.cross_entropy(logits, labels)) if mode == 'loss' else logits


class Draw(BaseMetric):
    """A score that rises, so that each model is the best so far."""

    scores = 0

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        type(self).scores += 1
        return dict(score=type(self).scores)


class Kill(Hook):
    """Ends the process before an iteration, as kill -9 does."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_while_writing(filename, times):
    """End the process when half of a file is on the disk, for the nth time."""
    put, written = LocalBackend.put, []

    def put_half(self, obj, filepath):
        written.append(Path(filepath).name)
        if written.count(filename) == times:
            put(self, obj[: len(obj) // 2], filepath)
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, obj, filepath)

    LocalBackend.put = put_half


def train(rank, folder, options):
    """Train in this process, which is killed as the options say."""
    options = dict(options)
    world = options.pop('world', 1)
    torch.set_num_threads(1)
    np.random.seed()
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR='127.0.0.1',
            MASTER_PORT=str(options.pop('port')),
        )
        torch.distributed.init_process_group('gloo', rank=rank, world_size=world)
    hooks = [HOOK] if options.pop('hook', True) else []
    if (iteration := options.pop('kill', None)) is not None:
        hooks.append(Kill(iteration))
    if writing := options.pop('kill_writing', None):
        kill_while_writing(*writing)
    make_runner(folder, hooks, world, **options).train()
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def make_runner(
    folder, hooks, world, workers=0, persistent=False, by_epoch=True, seed=7, **options
):
    """A runner; ``sampler``, ``checkpoint`` and the runner's own are options, too."""
    sampler = 'DefaultSampler' if by_epoch else 'InfiniteSampler'
    loader = dict(
        dataset=Noise(),
        batch_size=2,
        num_workers=workers,
        persistent_workers=persistent,
        sampler=dict(type=options.pop('sampler', sampler), shuffle=True),
        collate_fn=dict(type='default_collate'),
    )
    if by_epoch:
        loop = dict(by_epoch=True, max_epochs=EPOCHS, val_interval=1)
    else:
        loop = dict(by_epoch=False, max_iters=ITERS, val_interval=3)
    checkpoint = dict(
        type='CheckpointHook', interval=1 if by_epoch else 4, by_epoch=by_epoch
    )
    checkpoint |= dict(max_keep_ckpts=2) | options.pop('checkpoint', {})
    model = Classifier()
    if world > 1:
        model = MMDistributedDataParallel(model)
    validation = dict(loader, num_workers=0, persistent_workers=False)
    validation['sampler'] = dict(type='DefaultSampler', shuffle=False)
    return Runner(
        model=model,
        work_dir=str(folder),
        train_dataloader=loader,
        train_cfg=loop,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01, momentum=0.9)),
        val_dataloader=validation,
        val_cfg=dict(),
        val_evaluator=[Draw()],
        default_hooks=dict(checkpoint=checkpoint),
        custom_hooks=hooks,
        launcher='pytorch' if world > 1 else 'none',
        randomness=dict(seed=seed, diff_rank_seed=world > 1),
        experiment_name='resuming',
        **options,
    )


def run(folder, killed=False, **options):
    """Train in processes of its own, and return what they logged."""
    if options.get('world', 1) > 1:
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            options['port'] = free.getsockname()[1]
    context = torch.multiprocessing.get_context('fork')
    processes = [
        context.Process(target=train, args=(rank, folder, options))
        for rank in range(options.get('world', 1))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    # Where one of two is killed first, the other may end by its lost connection.
    assert -signal.SIGKILL in codes if killed else not any(codes)
    return ''.join(path.read_text() for path in sorted(folder.glob('*/*.log')))


def last_checkpoint(folder):
    return Path((folder / 'last_checkpoint').read_text())


def last(folder):
    return read_checkpoint(last_checkpoint(folder))


def words(capsys):
    return ' '.join(capsys.readouterr().out.split())


def same_weights(one, other):
    weights = last(other)['state_dict']
    return all(torch.equal(v, weights[k]) for k, v in last(one)['state_dict'].items())


EPOCH = dict()
ITERATION = dict(by_epoch=False)
BEST = dict(save_best='score', rule='greater')
LOOPS = [
    (EPOCH, 'epoch_1'),
    (dict(workers=2), 'epoch_1'),
    (dict(workers=2, persistent=True), 'epoch_1'),
    (dict(checkpoint=BEST), 'epoch_1'),
    (dict(world=2), 'epoch_1'),
    (dict(world=2, workers=1), 'epoch_1'),
    (ITERATION, 'iter_4'),
    (dict(ITERATION, checkpoint=dict(interval=4, save_begin=1)), 'iter_5'),
    (dict(ITERATION, checkpoint=BEST), 'iter_6'),
]
SECOND_EPOCH = BATCHES + 2


@pytest.mark.parametrize(('options', 'reached'), LOOPS, ids=str)
def test_killed_in_an_iteration(tmp_path, options, reached):
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    run(whole, **options)
    run(killed, killed=True, kill=SECOND_EPOCH, **options)
    assert last_checkpoint(killed).stem == reached
    log = run(killed, resume=True, **options)
    assert 'RandomStateHook: ' not in log
    assert same_weights(whole, killed)


def test_workers_of_a_run_by_iterations(tmp_path):
    """Where mmengine cannot skip what they have fetched, the run says so."""
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    options = dict(ITERATION, workers=2)
    run(whole, **options)
    run(killed, killed=True, kill=SECOND_EPOCH, **options)
    log = run(killed, resume=True, **options)
    skips = hasattr(InfiniteSampler, 'skip')
    assert ('RandomStateHook: with workers' in log) == (not skips)
    assert same_weights(whole, killed) or not skips


def test_without_the_hook_it_is_another_run(tmp_path):
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    run(whole, hook=False)
    run(killed, killed=True, kill=SECOND_EPOCH, hook=False)
    run(killed, resume=True, hook=False)
    assert not same_weights(whole, killed)


@pytest.mark.parametrize(
    ('options', 'times', 'named'),
    [(EPOCH, 1, 'epoch_1'), (dict(checkpoint=BEST), 2, 'epoch_2')],
    ids=['for the first time', 'anew, for the best model'],
)
def test_killed_while_a_checkpoint_is_written(tmp_path, capsys, options, times, named):
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    run(whole, **options)
    run(killed, killed=True, kill_writing=('epoch_2.pth', times), **options)
    assert last_checkpoint(killed).stem == named
    assert not is_whole(killed / 'epoch_2.pth')
    replacement = replacement_checkpoint(killed)
    if named == 'epoch_1':
        assert replacement is None
    else:
        assert replacement == killed / 'epoch_1.pth'
        assert f'not a whole checkpoint; going on from {replacement}' in words(capsys)
    run(killed, resume=True, load_from=replacement and str(replacement), **options)
    assert same_weights(whole, killed)


def test_the_seed_that_no_config_gave_is_restored(tmp_path):
    run(tmp_path / 'whole', seed=None)
    (tmp_path / 'resumed').mkdir()
    shutil.copy(tmp_path / 'whole/epoch_2.pth', tmp_path / 'resumed')
    marker = tmp_path / 'resumed/last_checkpoint'
    marker.write_text(str(tmp_path / 'resumed/epoch_2.pth'))
    run(tmp_path / 'resumed', seed=None, resume=True)
    assert last_checkpoint(tmp_path / 'resumed').stem == 'epoch_3'
    assert same_weights(tmp_path / 'whole', tmp_path / 'resumed')


def test_batches_do_not_depend_on_the_number_of_workers(tmp_path):
    run(tmp_path / 'one', workers=1)
    run(tmp_path / 'three', workers=3, persistent=True)
    assert same_weights(tmp_path / 'one', tmp_path / 'three')


def test_states_are_plain_and_of_every_process(tmp_path):
    run(tmp_path, world=2)
    torch.save(last(tmp_path)[KEY], tmp_path / 'states.pt')
    states = torch.load(tmp_path / 'states.pt', weights_only=True)
    first, second = states['processes']
    assert first.keys() == {'python', 'numpy', 'torch', 'cuda'}
    assert not torch.equal(first['torch'], second['torch'])
    assert first['numpy'] != second['numpy']
    assert first['python'] != second['python']


def test_other_number_of_processes_is_told_and_seeded_anew(tmp_path):
    run(tmp_path / 'two', killed=True, kill=SECOND_EPOCH, world=2)
    start = str(last_checkpoint(tmp_path / 'two'))
    for name in ('one', 'again'):
        log = run(tmp_path / name, resume=True, load_from=start)
        assert 'has those of 2 processes, but there are 1 processes' in log
    assert same_weights(tmp_path / 'one', tmp_path / 'again')


def test_a_checkpoint_without_states_is_told(tmp_path):
    run(tmp_path, killed=True, kill=SECOND_EPOCH, hook=False)
    assert 'the checkpoint has none, but' in run(tmp_path, resume=True)


def test_weights_alone_do_not_bring_their_states(tmp_path):
    run(tmp_path / 'source')
    source = last_checkpoint(tmp_path / 'source')
    content = read_checkpoint(source)
    del content[KEY]
    torch.save(content, tmp_path / 'weights.pth')
    for name, path in (('states', source), ('none', tmp_path / 'weights.pth')):
        log = run(tmp_path / name, load_from=str(path))
        assert 'RandomStateHook: ' not in log
    assert same_weights(tmp_path / 'states', tmp_path / 'none')


@pytest.mark.parametrize(
    ('options', 'told'),
    [
        (dict(checkpoint=dict(max_keep_ckpts=1)), 'max_keep_ckpts=2'),
        (dict(checkpoint=dict(by_epoch=False)), 'begins that epoch anew'),
        (
            dict(ITERATION, workers=1, sampler='DefaultSampler'),
            'with workers, BatchSampler and DefaultSampler',
        ),
    ],
    ids=str,
)
def test_what_cannot_be_resumed_is_told_at_the_start(tmp_path, options, told):
    assert told in run(tmp_path, killed=True, kill=0, **options)


def test_a_run_without_a_whole_checkpoint_is_not_resumed(tmp_path):
    assert replacement_checkpoint(tmp_path) is None
    marker = tmp_path / 'last_checkpoint'
    marker.write_text(f'{tmp_path}/epoch_9.pth')
    (tmp_path / 'epoch_9.pth').write_bytes(b'PK half of it')
    torch.save({}, tmp_path / 'epoch_12.pth')
    torch.save({}, tmp_path / 'best_score_epoch_8.pth')
    with pytest.raises(SystemExit, match=r'epoch_9.pth, which is not a whole.*anew'):
        replacement_checkpoint(tmp_path)
    for number in (3, 11):
        torch.save({}, tmp_path / f'epoch_{number}.pth')
    assert replacement_checkpoint(tmp_path) == tmp_path / 'epoch_3.pth'
    marker.write_text('')
    assert replacement_checkpoint(tmp_path) == tmp_path / 'epoch_12.pth'
    marker.write_text('s3://bucket/epoch_9.pth')
    assert replacement_checkpoint(tmp_path) is None
