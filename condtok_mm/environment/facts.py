"""What is installed here, and what of it runs.

It needs the standard library only, and what may fail runs in a second process, so that
it works where the stack does not.
"""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from .._stack import DISTRIBUTIONS, installed, is_original, versions
from . import probes
from .probes import CHECKPOINT, NEEDS

PACKAGES = (
    'torch',
    'torchvision',
    'numpy',
    'opencv-python',
    'opencv-python-headless',
    'opencv-contrib-python',
    'opencv-contrib-python-headless',
    'pycocotools',
    'setuptools',
    'condtok_mm',
)
"""Distributions that are looked up beside those of the OpenMMLab packages."""

MODULES = dict(
    numpy='numpy',
    torch='torch',
    torchvision='torchvision',
    opencv='cv2',
    pycocotools='pycocotools',
)
"""Steps of what the OpenMMLab packages stand on, to import names."""

VARIABLES = (
    'MMCV_WITH_OPS',
    'FORCE_CUDA',
    'TORCH_CUDA_ARCH_LIST',
    'CUDA_VISIBLE_DEVICES',
    'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD',
)
"""Environment variables that change what is built or run."""

TIMEOUT = 180
"""Seconds that one step may last."""


@dataclass
class Facts:
    """What was found.

    Attributes:
        python (str): Version of Python.
        executable (str): The Python.
        platform (str): The system.
        packages (dict[str, str]): Distributions of :data:`PACKAGES` with versions.
        stack (dict[str, dict[str, str]]): Of :func:`~condtok_mm._stack.installed`.
        importable (list[str]): Import names that Python finds: those of the
            stack, of :data:`MODULES`, and ``pkg_resources``.
        variables (dict[str, str]): Those of :data:`VARIABLES` that are set.
        nvcc (str | None): CUDA version of the compiler.
        driver (str | None): Version of NVIDIA's driver.
        driver_cuda (str | None): Highest CUDA version that it supports.
        driver_gpus (list[str]): Names of the GPUs that it sees.
        steps (dict[str, dict]): Name of a step to what it returned, or to the error
            that it ended with.
    """

    python: str
    executable: str
    platform: str
    packages: dict[str, str]
    stack: dict[str, dict[str, str]]
    importable: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    nvcc: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    driver_gpus: list[str] = field(default_factory=list)
    steps: dict[str, dict] = field(default_factory=dict)

    def error(self, step: str) -> str | None:
        """Say how a step failed.

        Args:
            step (str): Its name.

        Returns:
            str | None: The error; None if it did not fail.
        """
        return self.steps.get(step, {}).get('error')

    @property
    def checkpoints(self) -> dict[str, dict]:
        """Files that were read, to what that step returned."""
        return {
            step.removeprefix(CHECKPOINT): outcome
            for step, outcome in self.steps.items()
            if step.startswith(CHECKPOINT)
        }


def collect(checkpoints: Sequence[str] = (), timeout: float = TIMEOUT) -> Facts:
    """Look up what is installed, and try it.

    Args:
        checkpoints (Sequence[str]): Files to read. Defaults to none.
        timeout (float): Seconds that one step may last. Defaults to 180.

    Returns:
        Facts: What was found.
    """
    driver = _output('nvidia-smi')
    listed = _output('nvidia-smi', '--query-gpu=name', '--format=csv,noheader')
    cuda_home = os.environ.get('CUDA_HOME')
    nvcc = str(Path(cuda_home) / 'bin' / 'nvcc') if cuda_home else 'nvcc'
    names = (*DISTRIBUTIONS, *MODULES.values(), 'pkg_resources')
    steps = [*NEEDS, *(CHECKPOINT + path for path in checkpoints)]
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        packages=versions(PACKAGES),
        stack=installed(),
        importable=[name for name in names if find_spec(name)],
        variables={k: os.environ[k] for k in VARIABLES if k in os.environ},
        nvcc=_search(r'release (\d+\.\d+)', _output(nvcc, '--version')),
        driver=_search(r'Driver Version: *([\d.]+)', driver),
        driver_cuda=_search(r'CUDA (?:UMD )?Version: *(\d+\.\d+)', driver),
        driver_gpus=listed.splitlines(),
        steps=try_steps(steps, timeout),
    )


def try_steps(steps: Sequence[str], timeout: float = TIMEOUT) -> dict[str, dict]:
    """Run steps in a second process, and in another after each that one dies of.

    Args:
        steps (Sequence[str]): Their names, each after those that it needs.
        timeout (float): Seconds that one may last. Defaults to 180.

    Returns:
        dict[str, dict]: Each step to what it returned, or to its ``error``. What needs
            a step that its process died of is not tried.
    """
    outcomes, died = {}, set()
    script = [sys.executable, '-W', 'ignore', probes.__file__, str(timeout)]
    while remaining := [step for step in steps if step not in outcomes]:
        done = subprocess.run(
            [*script, *remaining],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding='utf-8',
            errors='replace',
            check=False,
        )
        outcomes |= dict(map(json.loads, done.stdout.splitlines()))
        if lost := [step for step in remaining if step not in outcomes]:
            outcomes[lost[0]] = dict(error=_death(done, timeout))
            died.add(lost[0])
        for step in lost[1:]:
            if needs := sorted(died.intersection(NEEDS.get(step, ('condtok_mm',)))):
                outcomes[step] = dict(error=f'not tried, since {needs[0]} failed')
                died.add(step)
    return outcomes


def table(facts: Facts) -> Iterator[tuple[str, str]]:
    """Say what was found, in the words of a bug report.

    Args:
        facts (Facts): What was found.

    Yields:
        tuple[str, str]: A thing, and what is known of it.
    """
    packages, steps = facts.packages, facts.steps
    yield 'Python', f'{facts.python}, {facts.executable}'
    yield 'platform', facts.platform
    yield 'torch', _row(facts, 'torch', _torch_build(steps.get('torch', {})))
    vision = steps.get('torchvision', {})
    build = f'CUDA {vision["cuda"]}' if vision.get('cuda') else 'without CUDA'
    yield 'torchvision', _row(facts, 'torchvision', build, 'nms runs')
    yield 'numpy', _row(facts, 'numpy')
    wheels = [f'{k} {v}' for k, v in packages.items() if k.startswith('opencv')]
    yield 'opencv', _row(facts, 'opencv', 'runs', what=', '.join(wheels))
    yield 'pycocotools', _row(facts, 'pycocotools', 'runs')
    resources = 'with' if 'pkg_resources' in facts.importable else 'without'
    number = packages.get('setuptools', 'not installed')
    yield 'setuptools', f'{number}, {resources} pkg_resources'
    for name, distributions in facts.stack.items():
        kind = 'original' if is_original({name: distributions}) else 'maintained'
        kind = 'not one' if len(distributions) > 1 else kind
        what = ' and '.join(f'{k} {v}' for k, v in distributions.items())
        what = what and f'{what} ({kind} stack)'
        yield name, _row(facts, name, what=what)
        if name == 'mmcv':
            ops = steps.get('mmcv.ops', {})
            with_cuda = re.fullmatch(r'[\d.]+', ops.get('cuda', ''))
            build = f'CUDA {ops["cuda"]}' if with_cuda else 'without CUDA'
            compiler = f'built by {ops.get("compiler")}'
            yield 'mmcv.ops', _row(facts, 'mmcv.ops', 'nms runs', compiler, build)
            count = steps.get('mmcv.ops on cuda', {}).get('count')
            runs = f'nms runs on {count} GPU(s)' if count else 'no GPU to run on'
            yield 'mmcv.ops on cuda', _row(facts, 'mmcv.ops on cuda', runs)
    yield 'condtok_mm', _row(facts, 'condtok_mm')
    gpus = ', '.join(
        f'{gpu["name"]} (sm_{"".join(map(str, gpu["capability"]))})'
        for gpu in steps.get('cuda', {}).get('gpus', [])
    )
    yield 'GPUs in torch', _row(facts, 'cuda', 'run' if gpus else 'none', what=gpus)
    if archs := steps.get('cuda', {}).get('archs'):
        yield "torch's GPU code", ' '.join(archs)
    if facts.driver:
        gpus = ', '.join(facts.driver_gpus) or 'no GPU'
        yield 'driver', f'{facts.driver}, CUDA up to {facts.driver_cuda}, {gpus}'
    else:
        yield 'driver', 'none'
    cuda = steps.get('torch', {}).get('cuda') or 'none'
    yield 'nvcc', f'CUDA {facts.nvcc or "none"} (torch: {cuda})'
    if facts.variables:
        yield 'variables', ', '.join(f'{k}={v}' for k, v in facts.variables.items())
    for path, outcome in facts.checkpoints.items():
        yield Path(path).name, _checkpoint_row(outcome)


def plain(text: str) -> str:
    """Take the folders out of a text.

    Args:
        text (str): An error.

    Returns:
        str: The same, with the last part of each path only.
    """
    return re.sub(r'(?<![\w:/])/(?:[^\s:\'"()/]+/)+', '', text)


def _death(done: subprocess.CompletedProcess, timeout: float) -> str:
    if 'Timeout (' in done.stderr:
        return f'did not return within {timeout:g} seconds'
    if done.returncode < 0:
        return f'crashed ({signal.Signals(-done.returncode).name})'
    last = (done.stderr.strip().splitlines() or [''])[-1]
    return f'ended its process with code {done.returncode} ({last})'


def _row(facts: Facts, step: str, *runs: str, what: str = '') -> str:
    what = what or facts.steps.get(step, {}).get('version') or facts.packages.get(step)
    if error := facts.error(step):
        runs = [f'FAILS: {plain(error)}']
    return ', '.join(filter(None, [what, *runs]))


def _torch_build(torch: dict) -> str:
    if torch.get('hip'):
        device = f'ROCm {torch["hip"]}'
    elif torch.get('cuda'):
        device = f'CUDA {torch["cuda"]}, cuDNN {torch["cudnn"]}'
    else:
        device = 'without CUDA'
    return f'{device}, cxx11 ABI {"on" if torch.get("cxx11_abi") else "off"}'


def _checkpoint_row(outcome: dict) -> str:
    if 'error' in outcome:
        return 'cannot be read here'
    writers = [f'{name} {number}' for name, number in outcome['writers'].items()]
    by = f'written by {", ".join(writers)}' if writers else 'does not say what wrote it'
    return f'can be read, {by}'


def _output(*command: str) -> str:
    """What a command prints; '' if there is none, or it fails."""
    if not (program := shutil.which(command[0])):
        return ''
    try:
        done = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return done.stdout if done.returncode == 0 else ''


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found and found[1]
