"""What a pickle may hold beside tensors: what mmengine's training checkpoints do.

torch's ``weights_only`` lets a pickle call everything on its list, with any arguments.
Called that way, NumPy's own constructors turn bytes of the file into object pointers.
So none of them is on the list: the names in a file lead to stand-ins, which check what
they are given and make numeric arrays and scalars only.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

NUMERIC = 'biufc'
"""Kinds of NumPy types that are numbers."""

STATISTICS = ('min', 'max', 'current', 'mean')
"""Methods that a ``HistoryBuffer`` stores by name with itself."""

HISTORY = ('max_length', '_log_history', '_count_history')
"""Attributes of a ``HistoryBuffer``."""


def allowed_globals() -> AbstractContextManager:
    """Let ``weights_only`` accept what mmengine's training checkpoints hold.

    Returns:
        AbstractContextManager: Inside of it ``torch.load`` does.
    """
    found = [
        _Array,
        _named(_Dtype, 'numpy.dtype'),
        _named(_History, f'{HistoryBuffer.__module__}.HistoryBuffer'),
        _named(_ndarray, 'numpy.ndarray'),
        _named(_statistic, 'builtins.getattr'),
        _named(_empty_bytes, 'builtins.bytes'),
        _named(_encode, '_codecs.encode'),
    ]
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):
        found += [
            _named(partial(_reconstruct), f'{module}._reconstruct'),
            _named(partial(_scalar), f'{module}.scalar'),
        ]
    if hasattr(torch.serialization, 'safe_globals'):
        return torch.serialization.safe_globals(found)
    torch.serialization.add_safe_globals(found)
    return nullcontext()


class _Dtype:
    """Stands for a NumPy dtype in a pickle: a number type and a byte order."""

    def __init__(self, code: str = '', align: bool = False, copy: bool = True) -> None:
        if not isinstance(code, str):
            raise _refused(f'dtype {code!r}')
        self.dtype = np.dtype(code)
        if self.dtype.kind not in NUMERIC:
            raise _refused(f'dtype {code!r}')

    def __setstate__(self, state: tuple) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ('<', '>', '=', '|') or any(state[2:5]):
            raise _refused('a structured dtype')
        self.dtype = self.dtype.newbyteorder(order)


class _Array(np.ndarray):
    """A NumPy array of numbers; pickled again it is a plain one."""

    def __new__(cls, *args, **kwargs) -> '_Array':
        raise _refused('a call of numpy.ndarray')

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise _refused('an array of objects')
        if not all(isinstance(side, int) and side >= 0 for side in shape) or (
            math.prod(shape) * dtype.dtype.itemsize != len(raw)
        ):
            raise _refused(f'an array of shape {shape} in {len(raw)} bytes')
        super().__setstate__((1, shape, dtype.dtype, bool(fortran), raw))

    def __reduce_ex__(self, protocol: int):
        return self.view(np.ndarray).__reduce_ex__(protocol)


class _History:
    """Becomes a ``HistoryBuffer`` once its state is there."""

    def __setstate__(self, state: dict) -> None:
        self.__class__ = HistoryBuffer
        self.__init__()
        self.__dict__.update({k: v for k, v in state.items() if k in HISTORY})


def _ndarray(*args) -> None:
    raise _refused('a call of numpy.ndarray')


def _reconstruct(kind: object, shape: tuple, code: bytes) -> _Array:
    if kind is not _ndarray or shape != (0,) or code != b'b':
        raise _refused('another array type')
    return np.ndarray.__new__(_Array, (0,), 'b')


def _scalar(dtype: _Dtype, raw: bytes) -> np.generic:
    if not isinstance(dtype, _Dtype) or len(raw) != dtype.dtype.itemsize:
        raise _refused('a scalar that is no number')
    return np.frombuffer(raw, dtype.dtype)[0]


def _statistic(owner: type, name: str):
    """What a pickled ``HistoryBuffer`` asks of ``getattr``, and nothing else."""
    if owner is not _History or name not in STATISTICS:
        raise _refused(f'getattr({owner!r}, {name!r})')
    return getattr(HistoryBuffer, name)


def _empty_bytes(*args) -> bytes:
    """What ``bytes`` is called for in a pickle of protocol 2, and nothing else."""
    if args:
        raise _refused(f'bytes{args!r}')
    return b''


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as a pickle of protocol 2 holds them, and no other codec."""
    if not isinstance(text, str) or encoding != 'latin1':
        raise _refused(f'_codecs.encode to {encoding!r}')
    return text.encode('latin1')


def _refused(what: str) -> UnpicklingError:
    return UnpicklingError(f'GLOBAL {what} is not allowed')


def _named(stand_in, path: str):
    """Let a pickle find a stand-in under another module and name."""
    stand_in.__module__, stand_in.__name__ = path.rsplit('.', 1)
    stand_in.__qualname__ = stand_in.__name__
    return stand_in
