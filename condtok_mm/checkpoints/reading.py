"""Read checkpoint files without executing anything in them."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import (
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from .unwrapping import WRAPPERS

STATISTICS = ('min', 'max', 'current', 'mean')
"""Methods that mmengine's ``HistoryBuffer`` stores by name with itself."""

REFUSED = (
    '{path} is a pickle that needs {needs}; reading it could execute what it holds, so '
    'it is refused. If you trust its source, rewrite it once, in a container without '
    'network or secrets: python -c "import torch; c = torch.load({name!r}, '
    "map_location='cpu', weights_only=False); torch.save({{k: c[k] for k in "
    '{wrappers} if k in c}} or c, {safe!r})"'
)


def read_checkpoint(path: str | Path, map_location='cpu') -> dict:
    """Read a checkpoint file, and execute nothing that it holds.

    Files are safetensors, or what ``torch.save`` wrote: tensors and plain Python
    values, and of other classes only those that mmengine's training checkpoints hold,
    its ``HistoryBuffer`` and NumPy arrays and scalars.

    Args:
        path (str | Path): File, http(s) URL, or a name that mmengine resolves to a
            URL, such as ``torchvision://resnet50``.
        map_location: Where to put the tensors, as for ``torch.load``. Defaults to
            'cpu'.

    Returns:
        dict: What the file holds.

    Raises:
        FileNotFoundError: If there is no such file, or no such name.
        ImportError: If the file is safetensors and the library is not installed.
        ValueError: If the file cannot be read, holds no dict, or would have to
            execute code.
    """
    path = _resolve(str(path))
    try:
        if path.startswith(('http://', 'https://')):
            checkpoint = _download(path, map_location)
        else:
            checkpoint = _read_local(Path(path).expanduser(), map_location)
    except (OSError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, UnpicklingError) and (
            needs := re.search(r'GLOBAL (\S+)', str(error))
        ):
            raise ValueError(_refusal(path, needs[1])) from None
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f'{path} cannot be read as a checkpoint ({words[0]}); it is not one, or '
            'was not copied whole.'
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(
            f'{path} holds a {type(checkpoint).__name__}, but a checkpoint is a dict '
            'of weights, or one that holds such a dict.'
        )
    return checkpoint


def use_safe_reader() -> None:
    """Make mmengine read every checkpoint of this process by :func:`read_checkpoint`.

    mmengine itself executes pickles. It keeps its own readers unless this is called,
    as the tools of this project do.
    """
    schemes = list(CheckpointLoader._schemes)
    CheckpointLoader.register_scheme(schemes, load_from_weights_only, force=True)


def load_from_weights_only(filename: str, map_location=None) -> dict:
    """:func:`read_checkpoint`, under the kind of name that mmengine's log expects.

    Args:
        filename (str): As for :func:`read_checkpoint`.
        map_location: As for ``torch.load``. Defaults to None.

    Returns:
        dict: What the file holds.
    """
    return read_checkpoint(filename, map_location)


def _read_local(path: Path, map_location) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f'checkpoint {path} does not exist.')
    if path.suffix == '.safetensors':
        return _read_safetensors(path)
    with _allowed():
        return torch.load(path, map_location=map_location, weights_only=True)


def _read_safetensors(path: Path) -> dict:
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            f'{path} needs the safetensors library. Run: pip install safetensors'
        ) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise RuntimeError(str(error)) from error


def _download(url: str, map_location) -> dict:
    if url.endswith('.safetensors'):
        raise ValueError(f'download {url} and name the file: only .pth is fetched.')
    load = torch.hub.load_state_dict_from_url
    with _allowed():
        if not is_main_process():
            barrier()
        checkpoint = load(url, map_location=map_location, weights_only=True)
        if is_main_process():
            barrier()
    return checkpoint


def _resolve(path: str) -> str:
    """The URL that a name of mmengine's model zoos stands for; other paths as is."""
    scheme, separator, name = path.partition('://')
    if not separator or scheme in ('http', 'https'):
        return path
    if scheme in ('torchvision', 'modelzoo'):
        zoo = get_torchvision_models()
    elif scheme in ('openmmlab', 'open-mmlab'):
        zoo = get_external_models()
        name = get_deprecated_model_names().get(name, name)
    elif scheme == 'mmcls':
        zoo = get_mmcls_models()
    else:
        raise ValueError(
            f'{path} is fetched by a client that executes pickles; download it and '
            'name the file.'
        )
    if name not in zoo:
        raise FileNotFoundError(f'{scheme}:// has no checkpoint named {name!r}.')
    return zoo[name]


def _refusal(path: str, needs: str) -> str:
    safe = str(Path(path).with_suffix('.weights.pth').name)
    return REFUSED.format(
        path=path, needs=needs, name=path, wrappers=WRAPPERS, safe=safe
    )


def _allowed() -> AbstractContextManager:
    """Let ``weights_only`` accept what mmengine's training checkpoints hold."""
    classes = _allowed_classes()
    if hasattr(torch.serialization, 'safe_globals'):
        return torch.serialization.safe_globals(classes)
    torch.serialization.add_safe_globals(classes)
    return nullcontext()


def _allowed_classes() -> list:
    core = np._core if np.lib.NumpyVersion(np.__version__) >= '2.0.0' else np.core
    numbers = '?bhilqBHILQefd'
    classes = [
        HistoryBuffer,
        np.ndarray,
        np.dtype,
        _renamed(_statistic, 'builtins.getattr'),
    ]
    classes += {type(np.dtype(code)) for code in numbers}
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):
        for name in ('_reconstruct', 'scalar'):
            function = getattr(core.multiarray, name)
            classes.append(_renamed(function, f'{module}.{name}'))
    return classes


def _renamed(function: Callable, path: str) -> Callable:
    """A function that a pickle finds under another module and name."""

    def call(*args):
        return function(*args)

    call.__module__, call.__name__ = path.rsplit('.', 1)
    call.__qualname__ = call.__name__
    return call


def _statistic(owner: type, name: str) -> Callable:
    """What a pickled ``HistoryBuffer`` asks of ``getattr``, and nothing else."""
    if owner is not HistoryBuffer or name not in STATISTICS:
        raise UnpicklingError(f'GLOBAL getattr({owner!r},{name!r}) is not allowed')
    return getattr(owner, name)
