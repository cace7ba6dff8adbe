"""Run the stock train and test scripts, with condtok_mm registered first.

mmpretrain's for a config whose ``default_scope`` is mmpretrain, a classifier; else
mmdet's. Checkpoints are read without executing anything in them.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import mmdet
import mmpretrain
import torch
from mmengine.config import Config, DictAction

from ..checkpoints import use_safe_reader
from ..datasets.coco_checks import check_datasets
from .resuming import replacement_checkpoint

OVERWRITE = '--overwrite'
NO_CHECK = '--no-check-dataset'

FLAGS = {
    'train.py': {
        OVERWRITE: 'replace an earlier run',
        NO_CHECK: 'train without a look at the data set',
    },
    'test.py': {OVERWRITE: 'replace an earlier run'},
}
"""Flags of ours beside those of the stock tools, which do not know them."""

RANKS = {
    'pytorch': 'RANK',
    'slurm': 'SLURM_PROCID',
    'mpi': 'OMPI_COMM_WORLD_RANK',
}
"""Launchers to the variable in which they number processes."""

RANDOM_STATES = [
    '--cfg-options',
    'default_hooks.random_state.type=condtok_mm.engine.RandomStateHook',
]
"""Adds the hook to a config, also to one that imports nothing of this package."""


def run_train() -> None:
    """Run the stock ``tools/train.py`` with the arguments of this process.

    A work directory that holds a run already is refused, unless the run is resumed or
    ``--overwrite`` is given. So are data sets that a detector would learn wrong things
    from, unless ``--no-check-dataset`` is given. Every run gets a ``RandomStateHook``,
    so that it can be resumed to the bit, and is resumed from a checkpoint that was
    written whole.

    Raises:
        SystemExit: If the run would overwrite another one, its data are at fault, or
            there is nothing whole to resume from.
    """
    parser = _parser('config', '--work-dir')
    parser.add_argument('--resume', nargs='?', const='auto')
    args = _parse(parser, 'train.py')
    cfg = _load_config(args)
    folder = args.work_dir or cfg.get('work_dir')
    folder = Path(folder or f'work_dirs/{Path(args.config).stem}')
    checkpoints = sorted(path.name for path in folder.glob('*.pth'))
    if checkpoints and not args.overwrite and args.resume is None:
        sys.exit(
            f'{folder} holds a run already ({", ".join(checkpoints)}). Go on with '
            f'it by --resume, give another --work-dir, or {OVERWRITE} it.'
        )
    if args.resume == 'auto' and (path := replacement_checkpoint(folder)):
        sys.argv += ['--resume', str(path)]
    sys.argv += RANDOM_STATES
    scope = cfg.get('default_scope')
    is_first = os.environ.get(RANKS.get(args.launcher, ''), '0') == '0'
    if not args.no_check_dataset and scope != 'mmpretrain' and is_first:
        _refuse_wrong_datasets(cfg)
    _run_stock_tool('train.py', scope, args.launcher)


def run_test() -> None:
    """Run the stock ``tools/test.py`` with the arguments of this process.

    Raises:
        SystemExit: If ``--out`` or an evaluator's ``outfile_prefix`` names a file
            that exists and ``--overwrite`` is not given, or the checkpoint does not
            exist.
    """
    args = _parse(_parser('config', 'checkpoint', '--out'), 'test.py')
    local = '://' not in args.checkpoint
    if local and not Path(args.checkpoint).is_file():
        sys.exit(f'checkpoint {args.checkpoint} does not exist.')
    cfg = _load_config(args)
    if not args.overwrite:
        for path in _outputs(args, cfg):
            if path.exists():
                sys.exit(f'{path} exists already; name another, or {OVERWRITE} it.')
    _run_stock_tool('test.py', cfg.get('default_scope'), args.launcher)


def _refuse_wrong_datasets(cfg: Config) -> None:
    """Exit if training would fail over its data sets, or learn something wrong."""
    reports, unknown = check_datasets(cfg, ('train_dataloader', 'val_dataloader'))
    failed = [report for report in reports if report.failed]
    if failed:
        sys.exit(
            '\n\n'.join(report.text() for report in failed)
            + f'\n\nNot trained: mend the above, or train all the same by {NO_CHECK}.'
        )
    for report in reports:
        line = f'{report.title}: {report.summary}'
        if kinds := len(report.findings.warnings()):
            line += f' ({kinds} kinds of warnings: tools/misc/check_dataset.py)'
        print(line)
    for name in unknown:
        print(f'not checked, as it does not read like CocoDataset: {name}')


def _outputs(args: argparse.Namespace, cfg: Config) -> Iterator[Path]:
    """Files that a test would write beside its work directory."""
    if args.out:
        yield Path(args.out)
    evaluators = cfg.get('test_evaluator') or []
    for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
        if prefix := evaluator.get('outfile_prefix'):
            yield from Path(prefix).parent.glob(f'{Path(prefix).name}.*')


def _load_config(args: argparse.Namespace) -> Config:
    cfg = Config.fromfile(args.config)
    cfg.merge_from_dict(args.cfg_options or {})
    return cfg


def _parser(*names: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    for name in names:
        parser.add_argument(name)
    parser.add_argument('--launcher', default='none')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser


def _parse(parser: argparse.ArgumentParser, tool: str) -> argparse.Namespace:
    """Read the arguments, and take those out of ``sys.argv`` that are ours alone."""
    flags = FLAGS[tool]
    if {'-h', '--help'} & set(sys.argv):
        print('Flags beside the stock ones:')
        for flag, purpose in flags.items():
            print(f'  {flag}  {purpose}')
        print()
        _run_stock_tool(tool)
    for flag in flags:
        parser.add_argument(flag, action='store_true')
    args, _ = parser.parse_known_args()
    sys.argv = [word for word in sys.argv if word not in flags]
    if not Path(args.config).is_file():
        sys.exit(f'config {args.config} does not exist.')
    return args


def _run_stock_tool(
    name: str, scope: str | None = 'mmdet', launcher: str = 'none'
) -> None:
    use_safe_reader()
    if launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine's own start-up selects a GPU whatever the backend.
        torch.distributed.init_process_group('gloo')
    stock = mmpretrain if scope == 'mmpretrain' else mmdet
    package = Path(stock.__file__).parent
    for tools in (package / '.mim' / 'tools', package.parent / 'tools'):
        if (tools / name).is_file():
            runpy.run_path(str(tools / name), run_name='__main__')
            if torch.distributed.is_initialized():
                # Threads of a process group that is left open can abort the exit.
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()
            return
    sys.exit(
        f'{stock.__name__} in {package} has no tools/{name} beside it; install '
        f'{stock.__name__} from a wheel or from a source checkout.'
    )
