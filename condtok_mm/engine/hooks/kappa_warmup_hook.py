"""Bring the conditioning in gradually."""

import logging

from mmengine.hooks import Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.logging import print_log
from mmengine.runner import IterBasedTrainLoop, Runner

from ...arguments import check_flag, shown
from ...conditioning import TokenConditioner
from ...registry import register

META_KEY = 'conditioner_strength'


@register('HOOKS')
class KappaWarmupHook(Hook):
    """Raises the strength of the conditioning linearly from 0 to 1.

    Strength 0 is the stock backbone, so that pretrained features are what they were at
    the first step. After n iterations the strength is a function of n alone: a resumed
    run goes on as if it had not been interrupted, and validation and checkpoints have
    that of the iterations done. All conditioners are set, also those in copies of the
    model that other hooks keep as ``ema_model``; the value of each iteration is logged
    as ``train/conditioner_strength``.

    Checkpoints note their strength in ``meta``. A run with this hook that loads one
    uses it for validation and tests, and 1 for a checkpoint without a note. Without
    this hook, as in mmdet's ``init_detector``, the strength is 1 whatever the
    checkpoint, and the conditioner warns if it was saved at less.

    A compiled model is compiled a second time when the strength first changes. Where
    torch specialises on floats, as it does up to 2.5, it is compiled anew for each
    value, and run uncompiled from the ninth on: there, resume with ``compile`` when the
    warm-up is over.

    Args:
        end (int): Epoch or iteration from which on the strength is 1.
        begin (int): Epoch or iteration up to which it is 0. Defaults to 0.
        by_epoch (bool): Count in epochs; the strength still rises with every
            iteration. False counts in iterations. Defaults to True.

    Raises:
        TypeError: If ``begin`` or ``end`` is not an integer, or ``by_epoch`` not a
            boolean.
        ValueError: If they are not in order, or ``by_epoch`` is asked for in a loop
            that has no epochs.
    """

    def __init__(self, end: int, begin: int = 0, by_epoch: bool = True) -> None:
        for name, value in (('end', end), ('begin', begin)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f'{name} must be a whole number of epochs or iterations, but got '
                    f'{shown(value)}; count in iterations (by_epoch=False) for a part '
                    'of an epoch.'
                )
        check_flag('by_epoch', by_epoch)
        if not 0 <= begin < end:
            raise ValueError(
                f'begin and end must satisfy 0 <= begin < end, but got begin={begin} '
                f'and end={end}.'
            )
        self.begin = begin
        self.end = end
        self.by_epoch = by_epoch
        self._conditioners: list[TokenConditioner] = []

    def before_train(self, runner: Runner) -> None:
        """Find the conditioners, and set what the first iteration has.

        Args:
            runner (Runner): The runner.

        Raises:
            ValueError: If ``by_epoch`` is asked for in a loop that has no epochs.
        """
        if self.by_epoch and isinstance(runner.train_loop, IterBasedTrainLoop):
            raise ValueError(
                'KappaWarmupHook counts in epochs, but got IterBasedTrainLoop, which '
                'has none; give begin and end in iterations, with by_epoch=False.'
            )
        self._conditioners = _find_conditioners(runner)
        if not self._conditioners:
            print_log(
                'KappaWarmupHook: the model has no conditioner, nothing to warm up.',
                logger='current',
                level=logging.WARNING,
            )
        self._set_strength(runner, runner.iter)

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None
    ) -> None:
        """Log the strength of an iteration.

        Args:
            runner (Runner): The runner.
            batch_idx (int): Index of the batch in its epoch; not used.
            data_batch (dict | tuple | list, optional): The batch; not used. Defaults
                to None.
        """
        for conditioner in self._conditioners[:1]:
            runner.message_hub.update_scalar(f'train/{META_KEY}', conditioner.strength)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: DATA_BATCH = None,
        outputs: dict | None = None,
    ) -> None:
        """Set what validation and checkpoints that follow the iteration have.

        Args:
            runner (Runner): The runner.
            batch_idx (int): Index of the batch in its epoch; not used.
            data_batch (dict | tuple | list, optional): The batch; not used. Defaults
                to None.
            outputs (dict, optional): Losses; not used. Defaults to None.
        """
        self._set_strength(runner, runner.iter + 1)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Note the strength.

        Args:
            runner (Runner): The runner.
            checkpoint (dict): What is saved. It is changed in place.
        """
        for conditioner in self._conditioners[:1]:
            checkpoint['meta'][META_KEY] = conditioner.strength

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Set the strength that a checkpoint was saved with.

        Args:
            runner (Runner): The runner.
            checkpoint (dict): What is loaded.
        """
        strength = (checkpoint.get('meta') or {}).get(META_KEY, 1.0)
        conditioners = _find_conditioners(runner)
        for conditioner in conditioners:
            conditioner.strength = strength
        if conditioners and strength < 1:
            print_log(
                'KappaWarmupHook: the checkpoint is from within the warm-up, its '
                f'conditioner has strength {strength:g}.',
                logger='current',
            )

    def _set_strength(self, runner: Runner, iters: int) -> None:
        """Set the strength after a number of iterations."""
        unit = len(runner.train_dataloader) if self.by_epoch else 1
        progress = (iters - self.begin * unit) / ((self.end - self.begin) * unit)
        for conditioner in self._conditioners:
            conditioner.strength = min(max(progress, 0.0), 1.0)


def _find_conditioners(runner: Runner) -> list[TokenConditioner]:
    """Those of the model and its averaged copies, whatever wraps them."""
    averaged = [getattr(hook, 'ema_model', None) for hook in runner.hooks]
    models = [runner.model, *(model for model in averaged if model is not None)]
    return [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, TokenConditioner)
    ]
