"""From the ``conditioner`` key of a config to a conditioned backbone."""

import inspect
import logging

import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, print_log
from torch import nn

from ...arguments import check_choice, check_type, shown
from ...conditioning import ScaleControl, TokenConditioner, attach_conditioner
from ...datasets.checks import padding_conflicts

TYPES = {kind.__name__: kind for kind in (TokenConditioner, ScaleControl)}


def install_conditioner(
    backbone: nn.Module,
    conditioner: dict | TokenConditioner | None,
    embed: str = 'patch_embed',
) -> None:
    """Attach what a config asks for, say so in the log, and watch the padding.

    Args:
        backbone (nn.Module): The backbone. It is changed in place.
        conditioner (dict | TokenConditioner | None): Arguments of TokenConditioner,
            with ``type='ScaleControl'`` of that control, one ready made, or None for
            stock tokens.
        embed (str): Dotted name of the embedding layer. Defaults to 'patch_embed'.

    Raises:
        TypeError: If ``conditioner`` is none of these, or holds an unknown key.
        ValueError: If one of its values is out of range.
    """
    name = type(backbone).__name__
    if conditioner is None:
        print_log(f'{name}: no conditioner, stock tokens.', logger='current')
        return
    if isinstance(conditioner, dict):
        for key in conditioner:
            check_type('a key of conditioner', key, str, 'the name of an argument')
        conditioner = build_conditioner(**conditioner)
    elif not isinstance(conditioner, TokenConditioner):
        raise TypeError(
            'conditioner must be a dict of the arguments of TokenConditioner, a '
            f'TokenConditioner or None, but got {shown(conditioner)}.'
        )
    attach_conditioner(backbone, conditioner, embed)
    if conditioner.pad_value is not None:
        conditioner.register_forward_pre_hook(_PaddingCheck(conditioner.pad_value))
    print_log(
        f'{name}: tokens conditioned behind {embed} ({conditioner.extra_repr()}).',
        logger='current',
    )


def build_conditioner(type: str = 'TokenConditioner', **kwargs) -> TokenConditioner:
    """Build a conditioner from its config.

    Args:
        type (str): 'TokenConditioner', or 'ScaleControl', which scales the tokens as
            much and conditions nothing. Defaults to 'TokenConditioner'.
        **kwargs: Arguments of TokenConditioner.

    Returns:
        TokenConditioner: The conditioner.

    Raises:
        TypeError: If there is an unknown argument, or one has a wrong type.
        ValueError: If the type is unknown, or a value is out of range.
    """
    check_choice("conditioner's type", type, TYPES)
    known = inspect.signature(TokenConditioner).parameters
    if unknown := sorted(set(kwargs) - set(known)):
        raise TypeError(
            f'conditioner has no argument {", ".join(unknown)}; it takes '
            f'{", ".join(known)}.'
        )
    return TYPES[type](**kwargs)


class _PaddingCheck:
    """Warns at the first forward if the run's config pads with another value.

    The config is the one that mmengine's runner has published by then; without a
    runner there is none to check.
    """

    def __init__(self, pad_value: float | tuple[float, ...]) -> None:
        self.pad_value = pad_value
        self.pending = True

    def __call__(self, module: nn.Module, inputs: tuple) -> None:
        if not self.pending or torch.compiler.is_compiling():
            return
        self.pending = False
        text = MessageHub.get_current_instance().runtime_info.get('cfg')
        if text is None:
            return
        for conflict in padding_conflicts(
            Config.fromstring(text, '.py'), self.pad_value
        ):
            print_log(conflict, logger='current', level=logging.WARNING)
