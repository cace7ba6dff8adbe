"""Resume a run to the bit."""

import logging
import random
from collections.abc import Iterator

import numpy as np
import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.logging import print_log
from mmengine.runner import IterBasedTrainLoop, Runner
from torch.utils.data import BatchSampler, Dataset, Sampler, get_worker_info

from ...registry import register

KEY = 'random_states'


@register('HOOKS')
class RandomStateHook(Hook):
    """Makes a resumed run draw what the uninterrupted one would have drawn.

    On CPU its weights are then the same to the last bit; on a GPU, as far as the
    operators are deterministic. mmengine stores nothing of what is random:

    * Checkpoints get the states of the generators of Python, NumPy and torch, with
      those of all GPUs, of each process, as ``random_states``, and the seed of the
      sampler, which a config without a seed would otherwise draw anew. They are
      restored by resuming, not by ``load_from``.
    * Before each batch that a worker fetches, its generators are seeded by the run's
      seed, the process and the number of the batch in the run alone, with persistent
      workers too. Without workers, the states of the process serve.
    * Validation leaves the generators as they were: where a run is resumed from, it
      is not repeated.

    With another number of processes or GPUs than before, or without states in the
    checkpoint, generators are seeded by the seed, the process and the iteration, and a
    warning says so. There are warnings at the start, too, where mmengine cannot go on
    from where a checkpoint was written, or could be left without a whole one. What a
    data set keeps between samples, such as a cache of images, is not stored, nor are
    gradients that are accumulated across a checkpoint, nor is a validation made up for
    that the run was killed in.
    """

    # States are gathered ahead of CheckpointHook, which writes with priority VERY_LOW.
    priority = 'LOW'

    def __init__(self) -> None:
        self._sampler: Sampler | None = None
        self._batches: _Batches | None = None
        self._gathered: tuple[int, dict] | None = None
        self._before_val: dict | None = None
        self._resumed: dict | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Note the states of a checkpoint, if the run is resumed from it.

        Args:
            runner (Runner): The runner.
            checkpoint (dict): What is loaded.
        """
        if runner._resume:
            self._resumed = checkpoint.get(KEY, {})

    def before_train(self, runner: Runner) -> None:
        """Restore the states, and seed what workers fetch.

        Args:
            runner (Runner): The runner.
        """
        for words in _obstacles(runner):
            _warn(words)
        loader, self._sampler = runner.train_dataloader, _sampler(runner)
        # Else each new iterator draws from the generator of the model.
        loader.generator = torch.Generator()
        if self._resumed is not None:
            self._restore(runner, self._resumed)
            _keep_states_while_skipping(runner)
        if loader.num_workers:
            self._batches = _Batches(loader.dataset, runner.seed)
            loader.dataset.__getitems__ = self._batches

    def before_train_epoch(self, runner: Runner) -> None:
        """Tell the workers with which batch of the run they begin.

        Args:
            runner (Runner): The runner.
        """
        if self._batches is not None:
            self._batches.first.fill_(runner.iter)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: DATA_BATCH = None,
        outputs: dict | None = None,
    ) -> None:
        """Gather the states of all processes, if a checkpoint follows.

        Args:
            runner (Runner): The runner.
            batch_idx (int): Index of the batch in its epoch; not used.
            data_batch (dict | tuple | list, optional): The batch; not used. Defaults
                to None.
            outputs (dict, optional): Losses; not used. Defaults to None.
        """
        for hook in _checkpoint_hooks(runner):
            if not hook.by_epoch and (
                hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
                or (hook.save_last and hook.is_last_train_iter(runner))
            ):
                self._gather(runner.iter + 1)
                return

    def after_train_epoch(self, runner: Runner) -> None:
        """Gather the states of all processes.

        Args:
            runner (Runner): The runner.
        """
        self._gather(runner.iter)

    def before_val(self, runner: Runner) -> None:
        """Keep the states, and gather them for a checkpoint of the best model.

        Args:
            runner (Runner): The runner.
        """
        self._before_val = _get_states()
        if self._sampler is not None:
            self._gather(runner.iter)

    def after_val(self, runner: Runner) -> None:
        """Undo what validation drew.

        Args:
            runner (Runner): The runner.
        """
        _set_states(self._before_val)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write the gathered states; mmengine calls this in the first process only.

        Args:
            runner (Runner): The runner.
            checkpoint (dict): What is saved. It is changed in place.
        """
        if self._gathered and self._gathered[0] == checkpoint['meta']['iter']:
            checkpoint[KEY] = self._gathered[1]

    def _gather(self, iters: int) -> None:
        """Collect the states after a number of iterations."""
        states = dict(
            processes=all_gather_object(_get_states()),
            sampler_seed=getattr(self._sampler, 'seed', None),
        )
        self._gathered = (iters, states)

    def _restore(self, runner: Runner, saved: dict) -> None:
        if (seed := saved.get('sampler_seed')) is not None:
            self._sampler.seed = seed
        processes = saved.get('processes', [])
        if len(processes) == get_world_size():
            own = processes[get_rank()]
            if len(own['cuda']) == len(_get_states()['cuda']):
                _set_states(own)
                return
            found = f'those of {len(own["cuda"])} GPUs'
        else:
            found = f'those of {len(processes)} processes' if processes else 'none'
        _warn(
            f'the run cannot be resumed to the bit: of states of random generators the '
            f'checkpoint has {found}, but there are {get_world_size()} processes with '
            f'{len(_get_states()["cuda"])} GPUs each. They are seeded anew.'
        )
        _reseed(runner.seed, get_rank(), runner.iter)


def _keep_states_while_skipping(runner: Runner) -> None:
    """See to it that what is skipped draws nothing.

    Where a run by iterations goes on, mmengine below 0.10.12 fetches the batches that
    it has had, and whatever they draw, once more.
    """
    loop = runner.train_loop
    iterator = getattr(loop, 'dataloader_iterator', None)
    if iterator is not None and runner.iter and not hasattr(iterator, 'skip_iter'):
        loop.dataloader_iterator = _Skipping(iterator, runner.iter)


class _Skipping:
    """Batches, the first of which leave the generators as they were.

    Args:
        batches (Iterator): The batches.
        count (int): How many of them are skipped.
    """

    def __init__(self, batches: Iterator, count: int) -> None:
        self._batches = batches
        self._left = count
        self._states = _get_states()

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> DATA_BATCH:
        batch = next(self._batches)
        if self._left:
            self._left -= 1
            _set_states(self._states)
        return batch


class _Batches:
    """Fetches batches in the workers of a loader, each from generators of its own.

    Args:
        dataset (Dataset): Where to fetch from.
        seed (int): Seed of the run.

    Attributes:
        first (Tensor): Number, in the run, of the first batch of the epoch; int64 (),
            shared with the workers.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.first = torch.zeros((), dtype=torch.int64).share_memory_()
        self._dataset = dataset
        self._seed = seed
        self._rank = get_rank()
        self._epoch: int | None = None
        self._fetched = 0

    def __call__(self, indices: list[int]) -> list:
        first, worker = self.first.item(), get_worker_info()
        if first != self._epoch:
            self._epoch, self._fetched = first, 0
        number = first + worker.id + self._fetched * worker.num_workers
        self._fetched += 1
        _reseed(self._seed, self._rank, number)
        if fetch := getattr(type(self._dataset), '__getitems__', None):
            return fetch(self._dataset, indices)
        return [self._dataset[index] for index in indices]


def _obstacles(runner: Runner) -> list[str]:
    """What keeps a run from being resumed to the bit."""
    found, loader, sampler = [], runner.train_dataloader, _sampler(runner)
    by_iter = isinstance(runner.train_loop, IterBasedTrainLoop)
    for hook in _checkpoint_hooks(runner):
        if hook.max_keep_ckpts == 1:
            found.append(
                'with max_keep_ckpts=1 the only checkpoint is deleted before the next '
                'one is written, and a run that is killed there cannot be resumed. Set '
                'default_hooks.checkpoint.max_keep_ckpts=2.'
            )
        if not by_iter and not hook.by_epoch:
            found.append(
                'a run that is resumed from a checkpoint within an epoch begins that '
                'epoch anew, and is not the uninterrupted one. Count checkpoints in '
                'epochs: default_hooks.checkpoint.by_epoch=True.'
            )
    skips = type(loader.batch_sampler) is BatchSampler and hasattr(sampler, 'skip')
    if by_iter and loader.num_workers and not skips:
        found.append(
            f'with workers, {type(loader.batch_sampler).__name__} and '
            f'{type(sampler).__name__}, this mmengine cannot go on from the batch '
            'where a run by iterations was interrupted. Use num_workers=0, or '
            'InfiniteSampler without a batch_sampler and onedl-mmengine >= 0.10.12.'
        )
    return found


def _checkpoint_hooks(runner: Runner) -> list[CheckpointHook]:
    return [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]


def _sampler(runner: Runner) -> Sampler:
    loader = runner.train_dataloader
    return getattr(loader.batch_sampler, 'sampler', loader.sampler)


def _get_states() -> dict:
    """States of all generators of this process, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return dict(
        python=random.getstate(),
        numpy=(name, keys.tolist(), *rest),
        torch=torch.get_rng_state(),
        cuda=cuda,
    )


def _set_states(states: dict) -> None:
    random.setstate(states['python'])
    np.random.set_state(states['numpy'])
    torch.set_rng_state(states['torch'].cpu())
    for device, state in enumerate(states['cuda']):
        torch.cuda.set_rng_state(state.cpu(), device)


def _reseed(*entropy: int) -> None:
    """Seed the generators of this process by some numbers."""
    words = np.random.SeedSequence(entropy).generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])


def _warn(words: str) -> None:
    print_log(f'RandomStateHook: {words}', logger='current', level=logging.WARNING)
