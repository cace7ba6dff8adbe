"""Run mmdet's own train and test scripts, with condtok_mm registered first."""

import argparse
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import mmdet
import torch
from mmengine.config import Config, DictAction

OVERWRITE = '--overwrite'


def run_train() -> None:
    """Run mmdet's ``tools/train.py`` with the arguments of this process.

    A work directory that holds a run already is refused, unless the run is resumed or
    ``--overwrite`` is given.

    Raises:
        SystemExit: If the run would overwrite another one.
    """
    args = _parse('config', '--work-dir', '--resume')
    if not args.overwrite and args.resume is None:
        folder = args.work_dir or _load_config(args).get('work_dir')
        folder = folder or f'work_dirs/{Path(args.config).stem}'
        if checkpoints := sorted(path.name for path in Path(folder).glob('*.pth')):
            sys.exit(
                f'{folder} holds a run already ({", ".join(checkpoints)}). Go on with '
                f'it by --resume, give another --work-dir, or {OVERWRITE} it.'
            )
    _run_mmdet_tool('train.py')


def run_test() -> None:
    """Run mmdet's ``tools/test.py`` with the arguments of this process.

    Raises:
        SystemExit: If ``--out`` or an evaluator's ``outfile_prefix`` names a file
            that exists and ``--overwrite`` is not given, or the checkpoint does not
            exist.
    """
    args = _parse('config', 'checkpoint', '--out')
    local = '://' not in args.checkpoint
    if local and not Path(args.checkpoint).is_file():
        sys.exit(f'checkpoint {args.checkpoint} does not exist.')
    if not args.overwrite:
        for path in _outputs(args):
            if path.exists():
                sys.exit(f'{path} exists already; name another, or {OVERWRITE} it.')
    _run_mmdet_tool('test.py')


def _outputs(args: argparse.Namespace) -> Iterator[Path]:
    """Files that a test would write beside its work directory."""
    if args.out:
        yield Path(args.out)
    evaluators = _load_config(args).get('test_evaluator') or []
    for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
        if prefix := evaluator.get('outfile_prefix'):
            yield from Path(prefix).parent.glob(f'{Path(prefix).name}.*')


def _load_config(args: argparse.Namespace) -> Config:
    cfg = Config.fromfile(args.config)
    cfg.merge_from_dict(args.cfg_options or {})
    return cfg


def _parse(*names: str) -> argparse.Namespace:
    """Read the named arguments, and take ``--overwrite`` out of ``sys.argv``."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in names:
        if name == '--resume':
            parser.add_argument(name, nargs='?', const='auto')
        else:
            parser.add_argument(name)
    parser.add_argument('--launcher', default='none')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    parser.add_argument(OVERWRITE, action='store_true')
    if {'-h', '--help'} & set(sys.argv):
        print(f"Flag beside mmdet's own: {OVERWRITE}, replace an earlier run.\n")
        return argparse.Namespace(overwrite=True, checkpoint='://', out=None)
    args, _ = parser.parse_known_args()
    sys.argv = [word for word in sys.argv if word != OVERWRITE]
    if not Path(args.config).is_file():
        sys.exit(f'config {args.config} does not exist.')
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine's own start-up selects a GPU whatever the backend.
        torch.distributed.init_process_group('gloo')
    return args


def _run_mmdet_tool(name: str) -> None:
    package = Path(mmdet.__file__).parent
    for tools in (package / '.mim' / 'tools', package.parent / 'tools'):
        if (tools / name).is_file():
            runpy.run_path(str(tools / name), run_name='__main__')
            if torch.distributed.is_initialized():
                # Threads of a process group that is left open can abort the exit.
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()
            return
    sys.exit(
        f'mmdet in {package} has no tools/{name} beside it; install mmdet from a wheel '
        'or from a source checkout.'
    )
