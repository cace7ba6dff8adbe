"""Log the conditioning of the tokens while a model trains."""

import logging
from collections.abc import Sequence

import torch
from mmengine.hooks import Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn

from ...arguments import check_integer, check_pad_value, check_type
from ...conditioning import TokenConditioner
from ...conditioning.attach import ConditionedForward, conditioned_layer
from ...conditioning.spectrum import (
    condition_over,
    default_rtol,
    numerical_rank,
    singular_values,
)
from ...models.backbones.any import find_embedding
from ...models.backbones.layers import statistics_kept
from ...registry import register


@register('HOOKS')
class ConditionNumberHook(Hook):
    """Logs condition numbers of the embedded tokens X of training batches.

    Scalars for every visualisation backend, the means over the images of a batch and
    over their tokens that hold image:

    * ``train/token_kappa``: kappa(X), and ``train/token_kappa_max``, the largest;
    * ``train/token_rank``: numerical rank r of X;
    * ``train/token_kappa_conditioned``: s_1 / s_r of X + C, with the r of X;
    * ``train/token_norm_growth``: Frobenius norm of X + C over that of X.

    A backbone without a conditioner has the first three. Iterations are counted as
    ``LoggerHook`` counts: with the same interval, or a multiple of its, each line of
    the log that has new values has those of its own iteration; others repeat the last
    ones. Each process measures its own batch and the first one logs.

    Training is the same to the last bit. The tokens are those that pass through the
    conditioner; without one, or at strength 0, the images are embedded once more, in
    IEEE fp32: half precision and TF32 fill the range of X with rounding noise. Images
    of padding only, or with inf or nan, are left out, and so are the further passes of
    an iteration. Compiled code cannot be watched: with ``compile`` in the config there
    is a warning and nothing else.

    Args:
        interval (int): Iterations from one measurement to the next. Defaults to 50.
        embed (str, optional): For a backbone without a conditioner, dotted name of the
            layer that returns the embedded tokens. Defaults to None, which finds it;
            see :func:`condtok_mm.models.backbones.any.find_embedding`.
        pad_value (float | Sequence[float], optional): For a backbone without a
            conditioner, pixel value of batch padding after normalisation, one for all
            channels or one per channel. None counts every token. Defaults to 0.0.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``interval`` is below 1, or ``pad_value`` not finite.
    """

    def __init__(
        self,
        interval: int = 50,
        embed: str | None = None,
        pad_value: float | Sequence[float] | None = 0.0,
    ) -> None:
        check_integer('interval', interval, 1)
        if embed is not None:
            check_type('embed', embed, str, 'the dotted name of a layer or None')
        if pad_value is not None:
            check_pad_value(pad_value)
        self.interval = interval
        self.embed = embed
        self.pad_value = pad_value
        self._probe: _Probe | None = None

    def before_train(self, runner: Runner) -> None:
        """Check that there are tokens to measure, and that they can be seen.

        Args:
            runner (Runner): The runner.

        Raises:
            ValueError: If the backbone has no such layer, or its patch embedding is
                not obvious.
        """
        self._find(runner.model)
        if runner.cfg.get('compile'):
            print_log(
                'ConditionNumberHook: nothing is logged, compiled code cannot be '
                'watched; train without compile to see the condition numbers.',
                logger='current',
                level=logging.WARNING,
            )

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None
    ) -> None:
        """Watch the embedding, in an iteration that is measured.

        Args:
            runner (Runner): The runner.
            batch_idx (int): Index of the batch in its epoch.
            data_batch (dict | tuple | list, optional): The batch; not used. Defaults
                to None.
        """
        if runner.cfg.get('compile'):
            return
        loader = runner.train_dataloader
        if self.every_n_inner_iters(batch_idx, self.interval) or (
            len(loader) < self.interval and self.end_of_epoch(loader, batch_idx)
        ):
            self._probe = _Probe(self._find(runner.model))

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: DATA_BATCH = None,
        outputs: dict | None = None,
    ) -> None:
        """Log what was measured, and leave the model as it was.

        Args:
            runner (Runner): The runner.
            batch_idx (int): Index of the batch in its epoch; not used.
            data_batch (dict | tuple | list, optional): The batch; not used. Defaults
                to None.
            outputs (dict, optional): Losses; not used. Defaults to None.
        """
        if self._probe is None:
            return
        self._probe.remove()
        for name, value in self._probe.scalars.items():
            runner.message_hub.update_scalar(f'train/{name}', value)
        self._probe = None

    def _find(self, model: nn.Module) -> ConditionedForward:
        """The forward of the embedding, or what would be it with a conditioner."""
        backbones = (
            module
            for name, module in model.named_modules()
            if name.rpartition('.')[2] == 'backbone'
        )
        backbone = next(backbones, model)
        if hasattr(backbone, 'conditioner'):
            return conditioned_layer(backbone).forward
        embed = find_embedding(backbone) if self.embed is None else self.embed
        layers = dict(backbone.named_modules())
        if not embed or embed not in layers:
            children = ', '.join(child for child, _ in backbone.named_children())
            raise ValueError(
                f'{type(backbone).__name__} has no layer {embed!r} to measure; its '
                f'children: {children}.'
            )
        return ConditionedForward(
            layers[embed], TokenConditioner(pad_value=self.pad_value)
        )


class _Probe:
    """Measures the tokens of the first pass through an embedding.

    Args:
        forward (ConditionedForward): Finds the tokens, or conditions them.
    """

    def __init__(self, forward: ConditionedForward) -> None:
        self.forward = forward
        self.scalars: dict[str, float] = {}
        self._handles = [
            forward.conditioner.register_forward_hook(self._conditioned),
            forward.layer.register_forward_hook(self._embedded, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _conditioned(self, conditioner: nn.Module, args: tuple, output: Tensor) -> None:
        if not self.scalars:
            self._measure(*args, output)

    @torch.no_grad()
    def _embedded(
        self, layer: nn.Module, args: tuple, kwargs: dict, output: object
    ) -> None:
        if self.scalars:
            return
        images = args[0]
        cuda = [images.device] if images.is_cuda else []
        with torch.random.fork_rng(cuda), statistics_kept(layer):
            output = self.forward.embed(*args, **kwargs)
        tokens, valid = self.forward.tokens(images, output)
        attached = layer.forward is self.forward
        self._measure(tokens, valid, tokens if attached else None)

    @torch.no_grad()
    def _measure(
        self, tokens: Tensor, valid: Tensor | None, conditioned: Tensor | None
    ) -> None:
        rtol = self.forward.conditioner.rtol or default_rtol(tokens.dtype)
        before = singular_values(tokens, valid, rtol)
        rank = numerical_rank(before, rtol)
        held = rank > 0
        if not held.any():
            return
        before, rank = before[held], rank[held]
        kappa = condition_over(before, rank)
        self.scalars = dict(
            token_kappa=kappa.mean().item(),
            token_kappa_max=kappa.max().item(),
            token_rank=rank.double().mean().item(),
        )
        if conditioned is None:
            return
        after = singular_values(conditioned, valid, rtol)[held]
        growth = after.norm(dim=1) / before.norm(dim=1)
        self.scalars.update(
            token_kappa_conditioned=condition_over(after, rank).mean().item(),
            token_norm_growth=growth.mean().item(),
        )
