"""Read checkpoint files without executing anything in them."""

import json
import re
import shlex
from pathlib import Path
from pickle import UnpicklingError
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import (
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from .unpickling import allowed_globals
from .unwrapping import WRAPPERS

REFUSED = (
    '{path} is a pickle that needs {needs}; reading it could execute what it holds, so '
    'it is refused. If you trust its source, rewrite it once, in a container without '
    'network or secrets: {command}'
)

REWRITE = (
    'import torch; {load}; '
    'torch.save({{k: c[k] for k in "{keys}".split() if k in c}} or c, {safe})'
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
        url = path.lower().startswith(('http://', 'https://'))
        file = _download(path) if url else Path(path).expanduser()
        checkpoint = _read_local(file, map_location)
    except (OSError, ImportError):
        raise
    except Exception as error:
        if needs := re.search(r'GLOBAL (.+?)(?: is not| was not| whose|$)', str(error)):
            raise ValueError(_refusal(path, needs[1])) from None
        words = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(error, UnpicklingError):
            words = ['not a file of weights']
        raise ValueError(
            f'{path} cannot be read as a checkpoint ({words[0]}); it is another kind '
            'of file, or was not copied whole.'
        ) from None
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


def rewrite_command(path: str, load: str) -> str:
    """Write the command that keeps the weights of a file and nothing else.

    Args:
        path (str): The file; the new one gets its name, ending in '.weights.pth'.
        load (str): Python code that reads the file into ``c``.

    Returns:
        str: A shell command.
    """
    safe = json.dumps(Path(path).with_suffix('.weights.pth').name)
    code = REWRITE.format(load=load, keys=' '.join(WRAPPERS), safe=safe)
    return shlex.join(('python', '-c', code))


def _read_local(path: Path, map_location) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f'checkpoint {path} does not exist.')
    if path.suffix == '.safetensors' or _begins_as_safetensors(path):
        return _read_safetensors(path)
    with allowed_globals():
        return torch.load(path, map_location=map_location, weights_only=True)


def _begins_as_safetensors(path: Path) -> bool:
    """Whether a length and a JSON header are where safetensors have them."""
    with path.open('rb') as file:
        head = file.read(9)
    return head.endswith(b'{') and not head.startswith((b'PK', b'\x80'))


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


def _download(url: str) -> Path:
    """Fetch a file into torch's cache, unless it is there."""
    folder = Path(torch.hub.get_dir()) / 'checkpoints'
    path = folder / Path(urlparse(url).path).name
    if not is_main_process():
        barrier()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print_log(f'downloading {url} to {path}', logger='current')
        torch.hub.download_url_to_file(url, str(path))
    if is_main_process():
        barrier()
    return path


def _resolve(path: str) -> str:
    """The URL that a name of mmengine's model zoos stands for; other paths as is."""
    scheme, separator, name = path.partition('://')
    if not separator or scheme.lower() in ('http', 'https'):
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
    name = json.dumps(path)
    load = f'c = torch.load({name}, map_location="cpu", weights_only=False)'
    command = rewrite_command(path, load)
    if '://' in path:
        command = 'download it, and read what this says of the file.'
    return REFUSED.format(path=path, needs=needs, command=command)
