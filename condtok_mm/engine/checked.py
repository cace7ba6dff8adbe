"""Reading what the command line of a tool names, with errors of one sentence."""

import argparse
import sys
import time
from pathlib import Path

import torch
from mmdet.apis import init_detector
from mmengine.config import Config, DictAction
from torch import nn

from ..analysis.images import find_images
from ..checkpoints import use_safe_reader
from ..conditioning.attach import conditioned_layer


def measuring_parser(description: str, name: str) -> argparse.ArgumentParser:
    """Make a parser for a tool that measures a detector on images.

    Args:
        description (str): What the tool does.
        name (str): Folder in ``work_dirs`` that it writes to.

    Returns:
        argparse.ArgumentParser: The parser. More can be added to it.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config with a conditioned backbone')
    parser.add_argument('checkpoint', nargs='?', help='weights; random without')
    parser.add_argument(
        '--images', nargs='+', help='images or folders; the test set without'
    )
    parser.add_argument('--max-images', type=int, default=8)
    parser.add_argument('--out-dir', default=f'work_dirs/{name}')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser


def select_images(args: argparse.Namespace, cfg: Config) -> list[Path]:
    """Find the images that a tool measures.

    Args:
        args (argparse.Namespace): Of a :func:`measuring_parser`.
        cfg (Config): Config of the detector.

    Returns:
        list[Path]: At most ``args.max_images`` files; it says so if there are more.

    Raises:
        SystemExit: If there is none.
    """
    try:
        paths = find_images(args.images, cfg)
    except FileNotFoundError as error:
        sys.exit(str(error))
    if len(paths) > args.max_images:
        print(f'measuring the first {args.max_images} of {len(paths)} images')
    return paths[: args.max_images]


def load_config(path: str, options: dict | None) -> Config:
    """Read the config of a detector.

    Args:
        path (str): The file.
        options (dict | None): What ``--cfg-options`` changes.

    Returns:
        Config: The config.

    Raises:
        SystemExit: If it cannot be read, or is not that of a detector.
    """
    if not Path(path).is_file():
        sys.exit(f'config {path} does not exist.')
    try:
        cfg = Config.fromfile(path)
        cfg.merge_from_dict(options or {})
        cfg.model.backbone.type  # noqa: B018
    except Exception as error:
        sys.exit(f'config {path} cannot be used: {_sentence(error)}')
    return cfg


def load_detector(cfg: Config, checkpoint: str | None, device: str) -> nn.Module:
    """Build a detector and load its weights.

    Args:
        cfg (Config): Its config.
        checkpoint (str | None): The weights; None leaves them random, and says so.
        device (str): Device.

    Returns:
        nn.Module: The detector, in evaluation mode.

    Raises:
        SystemExit: If it cannot be built, or the checkpoint cannot be read.
    """
    if checkpoint is None:
        print('no checkpoint given: the weights are random')
    elif not Path(checkpoint).is_file():
        sys.exit(f'checkpoint {checkpoint} does not exist.')
    use_safe_reader()
    try:
        torch.device(device)
        return init_detector(cfg, checkpoint, palette='random', device=device)
    except Exception as error:
        what = f'checkpoint {checkpoint}' if checkpoint else 'the model of the config'
        sys.exit(f'{what} cannot be used on {device}: {_sentence(error)}')


def load_conditioned(args: argparse.Namespace, cfg: Config) -> nn.Module:
    """Load a detector whose backbone has a conditioner.

    Args:
        args (argparse.Namespace): Of a :func:`measuring_parser`.
        cfg (Config): Its config.

    Returns:
        nn.Module: The detector, in evaluation mode.

    Raises:
        SystemExit: As :func:`load_detector`, and if there is no conditioner.
    """
    detector = load_detector(cfg, args.checkpoint, args.device)
    try:
        conditioned_layer(detector.backbone)
    except ValueError as error:
        sys.exit(f'{args.config}: {error} Use one of the condtok configs.')
    return detector


def make_run_folder(out_dir: str) -> Path:
    """Make a folder of its own for what a run writes, named after the time.

    Args:
        out_dir (str): What to make it in.

    Returns:
        Path: The folder.

    Raises:
        SystemExit: If it cannot be made.
    """
    folder = Path(out_dir) / time.strftime('%Y%m%d_%H%M%S')
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        sys.exit(f'{folder} cannot be made ({error}); name another --out-dir.')
    return folder


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ['']
    return f'{type(error).__name__}: {lines[0]}'
