"""What an environment holds, what is wrong with it, and the tool that says both."""

import argparse
import copy
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from mmengine.logging import HistoryBuffer

from condtok_mm._stack import DISTRIBUTIONS, installed, release
from condtok_mm.environment.facts import Facts, plain, table, try_steps
from condtok_mm.environment.findings import covers, find
from condtok_mm.environment.probes import NEEDS, STEPS
from condtok_mm.environment.remedies import TESTED

ROOT = Path(__file__).parents[1]
TOOL = ROOT / 'tools/misc/check_env.py'
HOPPER = dict(name='NVIDIA H100', capability=[9, 0])
IMPORTABLE = 'mmengine mmcv mmdet mmpretrain numpy torch torchvision cv2 pycocotools'


def maintained(**changes):
    """Facts of a machine with a GPU on which all is well."""
    steps = {name: {} for name in NEEDS}
    steps |= {
        'torch': dict(
            version='2.10.0+cu128', cuda='12.8', hip=None, cudnn=91002, cxx11_abi=True
        ),
        'torchvision': dict(version='0.25.0+cu128', cuda='12.8'),
        'cuda': dict(gpus=[HOPPER], archs=['sm_80', 'sm_90']),
        'mmcv.ops': dict(cuda='12.8', compiler='GCC 12.2'),
        'mmcv.ops on cuda': dict(count=1),
    }
    facts = dict(
        python='3.11.2',
        executable='python',
        platform='Linux',
        packages={'numpy': '2.2.6', 'opencv-python': '4.12.0', 'setuptools': '84.2.1'},
        stack=dict(
            mmengine={'onedl-mmengine': '0.10.12'},
            mmcv={'onedl-mmcv': '2.3.6'},
            mmdet={'onedl-mmdetection': '3.5.1'},
            mmpretrain={'onedl-mmpretrain': '1.3.6'},
        ),
        importable=IMPORTABLE.split(),
        nvcc='12.8',
        driver='570.1',
        driver_cuda='12.8',
        driver_gpus=['NVIDIA H100'],
    )
    steps |= changes.pop('steps', {})
    return Facts(**(facts | changes), steps=steps)


ORIGINAL = dict(
    mmengine={'mmengine': '0.10.7'},
    mmcv={'mmcv': '2.1.0'},
    mmdet={'mmdet': '3.3.0'},
    mmpretrain={'mmpretrain': '1.2.0'},
)
BUILD = (
    'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir '
    '--force-reinstall --no-deps '
)


def only(facts):
    """The one finding, whose command a shell can read."""
    (finding,) = find(facts)
    assert shlex.split(finding.command, comments=True)
    return finding


def test_nothing_is_wrong_with_either_stack():
    assert find(maintained()) == []
    resources = [*IMPORTABLE.split(), 'pkg_resources']
    assert find(maintained(stack=ORIGINAL, importable=resources)) == []


def test_every_step_is_known_and_stands_behind_what_it_needs():
    assert list(STEPS) == list(NEEDS)
    names = list(NEEDS)
    for step, needs in NEEDS.items():
        assert all(names.index(need) < names.index(step) for need in needs)


REQUIREMENTS = {False: 'requirements.txt', True: 'tools/requirements-openmmlab.txt'}


@pytest.mark.parametrize('original', [False, True])
def test_tested_versions_are_those_of_the_requirements(original):
    lines = (ROOT / REQUIREMENTS[original]).read_text().splitlines()
    torch_version, torchvision_version = TESTED[original]
    assert f'torch=={torch_version}' in lines
    assert f'torchvision=={torchvision_version}' in lines


@pytest.mark.parametrize('original', [False, True])
def test_table_of_the_readme_names_the_versions_of_the_requirements(original):
    table = (ROOT / 'README.md').read_text().partition('## Versions')[2]
    rows = [line.split('|') for line in table.splitlines() if line.startswith('|')]
    column = ' '.join(row[3 if original else 2] for row in rows)
    lines = (ROOT / REQUIREMENTS[original]).read_text().splitlines()
    pinned = dict(line.split('==') for line in lines if '==' in line)
    for name in pinned.keys() - {'torchvision', 'setuptools', 'opencv-python'}:
        assert pinned[name] in column.replace(',', ' ').split(), name


@pytest.mark.parametrize('arguments', ['--stack', '--stack mmlab', '--stack=mmlab'])
def test_a_stack_that_is_not_there_is_named(arguments):
    done = subprocess.run(
        ['bash', 'tools/run_tests.sh', *arguments.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ''
    assert 'mmlab' in done.stderr and 'onedl' in done.stderr


def test_original_stack_without_pkg_resources():
    finding = only(maintained(stack=ORIGINAL))
    assert 'imports pkg_resources, and setuptools 84.2.1' in finding.sentence
    assert finding.command == "pip install 'setuptools<81'"


def test_both_stacks_are_named_and_what_they_break_is_not():
    stack = maintained().stack | dict(mmcv={'onedl-mmcv': '2.3.6', 'mmcv': '2.1.0'})
    resources = [*IMPORTABLE.split(), 'pkg_resources']
    broken = {'mmcv.ops': dict(error='ImportError: undefined symbol')}
    facts = maintained(stack=stack, importable=resources, steps=broken)
    assert 'onedl-mmcv and mmcv are both installed' in only(facts).sentence
    assert only(facts).command.startswith('pip uninstall -y onedl-mmcv mmcv && pip ')


@pytest.mark.parametrize('fails', [False, True])
def test_mixed_stacks_are_an_error_if_something_fails(fails):
    stack = ORIGINAL | dict(mmcv={'onedl-mmcv': '2.3.6'})
    resources = [*IMPORTABLE.split(), 'pkg_resources']
    steps = {'mmdet': dict(error='AssertionError: MMCV==2.3.6')} if fails else {}
    finding = only(maintained(stack=stack, importable=resources, steps=steps))
    assert 'mmengine and onedl-mmcv and mmdet and mmpretrain' in finding.sentence
    assert finding.error == fails


def test_mmcv_lite_in_place_of_mmcv():
    stack = ORIGINAL | dict(mmcv={'mmcv-lite': '2.1.0'})
    steps = {'mmcv.ops': dict(error="ModuleNotFoundError: No module named 'mmcv._ext'")}
    resources = [*IMPORTABLE.split(), 'pkg_resources']
    finding = only(maintained(stack=stack, importable=resources, steps=steps))
    assert finding.sentence.startswith('mmcv-lite is mmcv without')
    expected = f'pip uninstall -y mmcv-lite && {BUILD}mmcv==2.1.0'
    assert finding.command == expected


def test_operators_that_do_not_load():
    symbol = 'ImportError: /opt/site-packages/mmcv/_ext.so: undefined symbol: _ZN'
    finding = only(maintained(steps={'mmcv.ops': dict(error=symbol)}))
    assert '(ImportError: _ext.so: undefined symbol: _ZN)' in finding.sentence
    assert finding.command == f'{BUILD}onedl-mmcv==2.3.6'


def test_torch_that_mmcv_does_not_build_against():
    steps = {
        'torch': maintained().steps['torch'] | dict(version='2.14.1'),
        'mmcv.ops': dict(error='ImportError: undefined symbol'),
    }
    finding = only(maintained(steps=steps))
    assert 'does not build against torch 2.14.1' in finding.sentence
    assert finding.command == (
        'pip install --force-reinstall torch==2.10.0 torchvision==0.25.0 && '
        f'{BUILD}onedl-mmcv==2.3.6'
    )


def test_torchvision_of_another_build():
    error = 'RuntimeError: operator torchvision::nms does not exist'
    steps = {'torchvision': dict(error=error), 'mmengine': dict(error=error)}
    finding = only(maintained(steps=steps))
    assert 'built for torch 2.10.0+cu128' in finding.sentence
    assert finding.command.endswith(
        "'torchvision==0.25.*' --index-url https://download.pytorch.org/whl/cu128"
    )


def test_package_built_for_numpy_1():
    error = 'ValueError: numpy.dtype size changed, may indicate binary incompatibility'
    facts = maintained(steps={'pycocotools': dict(error=error)})
    assert 'built for another numpy than 2.2.6' in only(facts).sentence
    assert only(facts).command.endswith('--no-cache-dir pycocotools')
    facts = maintained(
        steps={'torch': dict(error='RuntimeError: Numpy is not available')}
    )
    assert only(facts).command == "pip install 'numpy<2'"


def test_opencv_without_the_libraries_of_a_desktop():
    error = 'ImportError: libGL.so.1: cannot open shared object file'
    finding = only(maintained(steps={'opencv': dict(error=error)}))
    assert finding.command == (
        "pip uninstall -y opencv-python && pip install 'opencv-python-headless'"
    )


def test_opencvs_of_two_versions():
    wheels = {'opencv-python': '4.9.0', 'opencv-python-headless': '4.12.0'}
    finding = only(maintained(packages=wheels))
    assert finding.command.endswith('pip install opencv-python-headless==4.12.0')
    assert not finding.error


def test_operators_built_for_other_gpus():
    error = 'RuntimeError: CUDA error: no kernel image is available'
    facts = maintained(steps={'mmcv.ops on cuda': dict(error=error)})
    assert 'built for other GPUs than those of 9.0' in only(facts).sentence
    assert only(facts).command == (
        f"FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST='9.0' {BUILD}onedl-mmcv==2.3.6"
    )


@pytest.mark.parametrize('nvcc', ['13.0', None])
def test_operators_without_gpu_code_and_no_nvcc_to_build_them(nvcc):
    error = 'RuntimeError: nms_impl: implementation for device cuda:0 not found.'
    facts = maintained(nvcc=nvcc, steps={'mmcv.ops on cuda': dict(error=error)})
    assert 'without its GPU operators' in only(facts).sentence
    assert f'nvcc is {"of CUDA 13.0" if nvcc else "missing"}' in only(facts).sentence
    assert only(facts).command == (
        'pip install -U onedl-mim && mim install onedl-mmcv==2.3.6'
    )


@pytest.mark.parametrize(
    ('capability', 'driver', 'wheel'), [([12, 0], '13.1', 130), ([6, 1], '12.8', 126)]
)
def test_gpu_that_torch_has_no_code_for(capability, driver, wheel):
    gpu = dict(name='GPU', capability=capability)
    error = 'GPU: no kernel image'
    steps = {
        'cuda': dict(gpus=[gpu], archs=['sm_80', 'sm_90'], error=error),
        'mmcv.ops on cuda': dict(error=error),
    }
    finding = only(maintained(driver_cuda=driver, steps=steps))
    assert f'built for sm_80 sm_90, and GPU is sm_{capability[0]}' in finding.sentence
    assert finding.command.endswith(f'/whl/cu{wheel}')


@pytest.mark.parametrize(
    ('archs', 'capability', 'runs'),
    [
        ('sm_80 sm_90', (8, 6), True),
        ('sm_86', (8, 0), False),
        ('sm_80 sm_90', (12, 0), False),
        ('sm_80 compute_80', (12, 0), True),
        ('sm_90a', (9, 0), True),
        ('sm_100a', (10, 3), False),
        ('sm_120', (12, 0), True),
    ],
)
def test_which_code_runs_on_which_gpu(archs, capability, runs):
    assert covers(archs.split(), capability) is runs


def test_gpus_that_torch_does_not_see():
    none = {'cuda': dict(gpus=[], archs=[]), 'mmcv.ops on cuda': dict(count=0)}
    finding = only(maintained(driver='470.1', driver_cuda='11.8', steps=none))
    assert 'uses CUDA 12.8, and driver 470.1 supports CUDA up to 11.8' in (
        finding.sentence
    )
    assert finding.command.endswith('/whl/cu118')
    assert not finding.error
    hidden = maintained(variables=dict(CUDA_VISIBLE_DEVICES='-1'), steps=none)
    assert only(hidden).command == 'unset CUDA_VISIBLE_DEVICES'
    build = dict(torch=maintained().steps['torch'] | dict(cuda=None))
    finding = only(maintained(steps=none | build))
    assert 'built without CUDA' in finding.sentence
    assert finding.command.endswith('/whl/cu128')


def test_variable_that_leaves_operators_out():
    finding = only(maintained(variables=dict(MMCV_WITH_OPS='0')))
    assert finding.command == 'unset MMCV_WITH_OPS'


def test_findings_leave_the_facts_alone():
    facts = maintained(steps={'pycocotools': dict(error='ImportError: x')})
    before = copy.deepcopy(facts)
    find(facts)
    list(table(facts))
    assert facts == before


def test_folders_are_left_out():
    text = 'OSError: "/home/me/a b/mmcv/_ext.so": see https://pytorch.org/a/b and 1/2'
    assert plain('at /a/b/c.so: bad') == 'at c.so: bad'
    assert '/home' not in plain(text)
    assert 'https://pytorch.org/a/b and 1/2' in plain(text)


def test_release_of_a_version():
    assert release('2.10.0+cu128') == (2, 10, 0)
    assert release('2.4.0a0') == (2, 4, 0)
    assert release('unknown') == ()


def package(site, name, code):
    folder = site / name
    folder.mkdir(parents=True)
    (folder / '__init__.py').write_text(code)


CRASH = 'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)'


@pytest.mark.parametrize(
    ('code', 'error'),
    [
        (CRASH, 'crashed (SIGSEGV)'),
        ('import time; time.sleep(60)', 'did not return within 5 seconds'),
        ('import os; os._exit(3)', 'ended its process with code 3 ()'),
        ('raise SystemExit("no license")', 'SystemExit: no license'),
    ],
)
def test_a_step_that_takes_its_process_with_it(tmp_path, monkeypatch, code, error):
    package(tmp_path, 'torch', code)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    outcomes = try_steps(['numpy', 'torch', 'torchvision', 'pycocotools'], timeout=5)
    assert 'version' in outcomes['numpy']
    assert outcomes['torch'] == dict(error=error)
    assert 'error' in outcomes['torchvision']
    assert outcomes['pycocotools'] == {}


def run(*args, python=sys.executable, path=(ROOT,), cwd=None):
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(map(str, path)))
    return subprocess.run(
        [python, '-W', 'ignore', TOOL, *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_this_environment_and_checkpoints(tmp_path):
    """The stack here works; one file each for what can become of a checkpoint."""
    state = dict(a=torch.ones(1))
    meta = dict(mmengine_version='0.10.7', epoch=3)
    torch.save(dict(state_dict=state), tmp_path / 'weights.pth')
    old = tmp_path / 'old.pth'
    torch.save(dict(model=state), old, _use_new_zipfile_serialization=False)
    hub = dict(loss=HistoryBuffer([0.5], [1]))
    torch.save(
        dict(state_dict=state, meta=meta, message_hub=hub), tmp_path / 'epoch_3.pth'
    )
    done = run('weights.pth', 'old.pth', 'epoch_3.pth', cwd=tmp_path)
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert f'{torch.__version__}, ' in out
    assert 'nms runs, built by' in out
    assert 'can be read, does not say what wrote it' in out
    assert 'can be read, written by torch before 1.6, by its file format' in out
    assert 'can be read, written by mmengine 0.10.7' in out
    assert out.endswith('errors: 0, warnings: 1\n')
    assert str(tmp_path) not in out
    line = next(
        line for line in out.splitlines() if line.startswith('warning: epoch_3')
    )
    assert 'HistoryBuffer' in line
    command = next(line for line in out.splitlines() if line.startswith('    python'))
    words = shlex.split(command)
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, env=env, check=True)
    written = torch.load(tmp_path / 'epoch_3.weights.pth', weights_only=True)
    assert written == dict(state_dict=state)


def test_checkpoint_that_is_refused(tmp_path):
    content = dict(model=dict(a=torch.ones(1)), args=argparse.Namespace(lr=1))
    torch.save(content, tmp_path / 'a.pth')
    done = run('a.pth', 'none.pth', cwd=tmp_path)
    assert done.returncode == 1
    assert 'ERROR: a.pth is a pickle that needs argparse.Namespace;' in done.stdout
    assert 'python -c ' in done.stdout
    assert 'ERROR: checkpoint none.pth does not exist' in done.stdout
    assert done.stdout.endswith('errors: 2, warnings: 0\n')


def test_broken_mmcv_and_both_stacks(tmp_path):
    package(tmp_path, 'mmcv', CRASH)
    done = run(path=(tmp_path, ROOT))
    assert done.returncode == 1
    assert 'ERROR: mmcv does not run here (crashed (SIGSEGV)).' in done.stdout
    assert 'not tried, since mmcv failed' in done.stdout
    one, other = DISTRIBUTIONS['mmengine']
    if one not in installed()['mmengine']:
        one, other = other, one
    metadata = tmp_path / f'{other.replace("-", "_")}-0.10.7.dist-info/METADATA'
    metadata.parent.mkdir()
    metadata.write_text(f'Name: {other}\nVersion: 0.10.7\n')
    done = run(path=(tmp_path, ROOT))
    assert done.returncode == 1
    assert 'ERROR: onedl-mmengine and mmengine are both installed' in done.stdout
    assert 'ERROR: mmcv does not run' not in done.stdout


def test_where_nothing_is_installed(tmp_path):
    venv.create(tmp_path / 'bare')
    python = tmp_path / 'bare/bin/python'
    done = run(python=python, path=())
    assert done.returncode == 1, done.stderr
    assert (
        'ERROR: numpy and torch and torchvision and opencv and pycocotools are not '
        'installed.\n    pip install numpy torch==2.10.0 torchvision==0.25.0 '
    ) in done.stdout
    assert 'ERROR: condtok_mm needs mmengine >= ' in done.stdout
    assert done.stdout.endswith('errors: 2, warnings: 0\n')
