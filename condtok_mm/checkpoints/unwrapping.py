"""Find the weights of a backbone in what a checkpoint file holds."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

WRAPPERS = (
    'state_dict_ema',
    'model_ema',
    'teacher',
    'state_dict',
    'model',
    'student',
    'module',
)
"""Keys that state dicts lie under, averaged weights first, as their authors use them.

mmengine's ``ema_state_dict`` is not one: there ``state_dict`` is the averaged one.
"""

DEPTH = 4
"""Most keys around a state dict, and most components of a prefix inside it."""


def unwrap(checkpoint: dict) -> tuple[dict[str, Tensor], str]:
    """Take the state dict out of a checkpoint.

    Args:
        checkpoint (dict): What a file holds: a state dict, or one under a usual key,
            such as 'model' or 'state_dict_ema', also nested.

    Returns:
        tuple[dict[str, Tensor], str]: The tensors, and where they were: the keys
        joined by dots, '' for the top.

    Raises:
        ValueError: If there are no tensors where state dicts are.
    """
    path = []
    while len(path) < DEPTH and (wrapper := _wrapper(checkpoint)):
        checkpoint = checkpoint[wrapper]
        path.append(wrapper)
    tensors = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in checkpoint.items()
        if isinstance(key, str) and isinstance(value, Tensor | np.ndarray)
    }
    if not tensors:
        where = ' under ' + '.'.join(path) if path else ''
        held = ', '.join(map(str, list(checkpoint)[:5])) or 'nothing'
        raise ValueError(
            f'the checkpoint holds no weights{where}, only {held}; weights are looked '
            f'for at its top and under {", ".join(WRAPPERS)}.'
        )
    return tensors, '.'.join(path)


def _wrapper(checkpoint: dict) -> str | None:
    """The first key that holds a dict with something in it."""
    found = (k for k in WRAPPERS if isinstance(checkpoint.get(k), dict))
    return next((key for key in found if checkpoint[key]), None)


def prefixes(state_dict: dict[str, Tensor], anchors: set[str]) -> Iterator[str]:
    """Prefixes that a backbone's keys may have, shortest first.

    Args:
        state_dict (dict[str, Tensor]): Weights.
        anchors (set[str]): First components of keys of a backbone.

    Yields:
        str: '' and what stands before an anchor, with a dot behind.
    """
    found = {''}
    for key in state_dict:
        parts = key.split('.')
        found.update(
            '.'.join(parts[:depth]) + '.'
            for depth in range(1, min(DEPTH, len(parts) - 1) + 1)
            if parts[depth] in anchors
        )
    # Of a student and a teacher, the teacher is the averaged one.
    yield from sorted(found, key=lambda p: (p.count('.'), 'teacher' not in p, p))


def strip(state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Keep the keys that have a prefix, without it.

    Args:
        state_dict (dict[str, Tensor]): Weights.
        prefix (str): Prefix, with its dot.

    Returns:
        dict[str, Tensor]: Weights under shorter names.
    """
    return {
        key[len(prefix) :]: value
        for key, value in state_dict.items()
        if key.startswith(prefix)
    }
