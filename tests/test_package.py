"""The package as it is installed: the wheel, the gate, and the style of the code."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import condtok_mm
from condtok_mm.datasets import make_shapes

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_paths()['purelib'])
TINY = [
    'model.backbone.init_cfg=None',
    'train_cfg.max_epochs=1',
    'train_cfg.val_interval=10',
    'train_dataloader.batch_size=1',
    'train_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'train_dataloader.dataset.data_root=data/',
    'train_dataloader.dataset.ann_file=annotations/instances_train.json',
    'train_dataloader.dataset.data_prefix.img=train/',
    'train_dataloader.dataset.metainfo.classes=(disc,square,triangle,star,cross)',
    'train_dataloader.dataset.pipeline.2.scale=(64,64)',
    'train_dataloader.dataset.indices=[0]',
    'val_cfg=None',
    'val_dataloader=None',
    'val_evaluator=None',
]
FROM_MMDET = """\
_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
model = dict(backbone=dict(
    type='CondTokSwinTransformer', conditioner=dict(kappa=2.0, floor=0.1)))
"""
FROM_CONFIGS = """\
_base_ = __import__('condtok_mm').CONFIGS + '/mask_rcnn/{name}'
model = dict(backbone=dict(conditioner=dict(floor=0.2)))
""".format(name='mask-rcnn_swin-t-p4-w7-condtok_fpn_1x_coco.py')


def python(*args, path=(), cwd=None):
    """Run this python with folders in front of its path."""
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(map(str, path)))
    return subprocess.run(
        [sys.executable, '-W', 'ignore', *map(str, args)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """A folder into which nothing but the wheel has been unpacked."""
    source = tmp_path_factory.mktemp('source') / 'condtok_mm'
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns('.*', 'build', 'data', 'work_dirs')
    )
    built, target = tmp_path_factory.mktemp('wheel'), tmp_path_factory.mktemp('site')
    pip = ['-m', 'pip', '--disable-pip-version-check', '-q']
    build = ['wheel', '--no-deps', '--no-build-isolation', '-w', built, source]
    done = python(*pip, *build)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.glob('*.whl')
    done = python(*pip, 'install', '--no-deps', '--target', target, path)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_configs_and_tools_lie_in_the_wheel(wheel):
    mim = wheel / 'condtok_mm/.mim'
    for folder in ('configs', 'tools'):
        expected = {p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob('*.py')}
        assert expected == {
            p.relative_to(mim / folder)
            for p in mim.rglob('*.py')
            if (mim / folder in p.parents)
        }


@pytest.mark.parametrize('config', [FROM_MMDET, FROM_CONFIGS], ids=['mmdet', 'ours'])
def test_five_lines_train_elsewhere_with_stock_tools(wheel, tmp_path, config):
    import mmdet

    make_shapes(tmp_path / 'data', num_train=2, num_val=1, progress=False)
    (tmp_path / 'config.py').write_text(config)
    train = Path(mmdet.__file__).parent / '.mim/tools/train.py'
    done = python(
        train, 'config.py', '--cfg-options', *TINY, path=[wheel], cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    floor = 'floor=0.2' if config is FROM_CONFIGS else 'floor=0.1'
    assert f'conditioned behind patch_embed (kappa=2, {floor}' in done.stdout
    assert (tmp_path / 'work_dirs/config/epoch_1.pth').is_file()


def isolated(folder, keep=()):
    """A site-packages without the OpenMMLab packages, but for the named ones."""
    folder.mkdir()
    for entry in SITE.iterdir():
        name = entry.name.lower()
        ours = 'condtok' in name or name.endswith('.pth')
        openmmlab = name.startswith(('mm', 'onedl'))
        if not ours and (not openmmlab or entry.name in keep):
            (folder / entry.name).symlink_to(entry)
    return folder


def bare_python(site, code):
    """Run code with nothing on the path but a site-packages and this project."""
    setup = f'import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]; '
    return subprocess.run(
        [sys.executable, '-I', '-S', '-W', 'ignore', '-c', setup + code],
        capture_output=True,
        text=True,
        check=False,
    )


def test_conditioning_works_with_torch_alone(tmp_path):
    done = bare_python(
        isolated(tmp_path / 'site'),
        'import torch; from condtok_mm.conditioning import TokenConditioner; '
        'print(tuple(TokenConditioner()(torch.randn(1, 9, 4)).shape)); '
        'print({"mmengine", "mmcv", "mmdet", "mmpretrain"} & set(sys.modules))',
    )
    assert done.stdout == '(1, 9, 4)\nset()\n', done.stderr


def test_incomplete_stack_is_named_with_the_remedy(tmp_path):
    done = bare_python(
        isolated(tmp_path / 'site', keep=('mmengine',)), 'import condtok_mm'
    )
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith('ImportError: condtok_mm needs mmcv >= ')
    assert "pip install 'condtok_mm[onedl]'" in message


def fake_distribution(site, name, version):
    folder = site / f'{name.replace("-", "_")}-{version}.dist-info'
    folder.mkdir()
    (folder / 'METADATA').write_text(f'Name: {name}\nVersion: {version}\n')


def test_both_stacks_at_once_are_named(tmp_path):
    site = isolated(tmp_path / 'site', keep=('mmengine',))
    fake_distribution(site, 'mmengine', '0.10.7')
    fake_distribution(site, 'onedl-mmengine', '0.10.12')
    message = bare_python(site, 'import condtok_mm').stderr.strip().splitlines()[-1]
    assert 'onedl-mmengine and mmengine are both installed' in message
    assert 'pip uninstall -y onedl-mmengine mmengine' in message


def test_old_version_is_named(tmp_path):
    site = isolated(tmp_path / 'site', keep=('mmengine',))
    fake_distribution(site, 'mmengine', '0.7.0')
    message = bare_python(site, 'import condtok_mm').stderr.strip().splitlines()[-1]
    assert (
        'needs 0.10.3 <= mmengine < 1.0.0, but mmengine 0.7.0 is installed' in message
    )


def test_mmcv_without_operators_is_named(tmp_path):
    """As after a build that skipped them, or one for another torch."""
    site = isolated(tmp_path / 'site', keep=[e.name for e in SITE.iterdir()])
    (site / 'mmcv').unlink()
    shutil.copytree(
        SITE / 'mmcv', site / 'mmcv', ignore=shutil.ignore_patterns('_ext*', '.mim')
    )
    message = bare_python(site, 'import condtok_mm').stderr.strip().splitlines()[-1]
    assert 'mmcv is installed, but its compiled operators do not load' in message
    assert '--no-cache-dir' in message


def test_top_level_is_fixed():
    listed = subprocess.run(
        ['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = {line.split('/')[0] for line in listed.stdout.splitlines()}
    if not names:
        pytest.skip('not a git checkout')
    assert {name for name in names if not name.startswith('.')} == {
        'LICENSE',
        'README.md',
        'condtok_mm',
        'configs',
        'requirements.txt',
        'setup.py',
        'tests',
        'tools',
    }


@pytest.mark.parametrize('command', [['check'], ['format', '--check']], ids=' '.join)
def test_style(command):
    done = subprocess.run(
        [sys.executable, '-m', 'ruff', *command, '.'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_configs_folder():
    assert Path(condtok_mm.CONFIGS) == ROOT / 'configs'
