"""What is wrong with an environment, and the command that mends it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .._stack import (
    DISTRIBUTIONS,
    MAINTAINED,
    ORIGINAL,
    build_mmcv,
    is_original,
    release,
    stack_problems,
)
from .facts import MODULES, Facts, plain
from .probes import NEEDS
from .remedies import (
    OLD_GPUS,
    TOO_NEW,
    has_fitting_nvcc,
    install_missing,
    install_torch,
    mmcv_for_gpus,
    newest_cuda,
    reinstall,
)

REFUSES = (2, 6)
"""First torch whose ``torch.load`` refuses what is no weights."""

NUMPY_ABI = (
    r'numpy\.dtype size changed|multiarray failed to import|_ARRAY_API|'
    r'(?i:numpy is not available)|compiled (using|against)'
)
"""What packages say that were built for another major version of numpy."""

STACK = {*DISTRIBUTIONS, 'mmcv.ops', 'mmcv.ops on cuda', 'condtok_mm'}
"""Steps that a stack which is wrong as a whole makes fail."""


@dataclass
class Finding:
    """Something that is wrong.

    Attributes:
        sentence (str): What.
        command (str): What mends it; '' if the sentence says it.
        error (bool): Whether training or testing fails for it. Defaults to True.
    """

    sentence: str
    command: str
    error: bool = True


def find(facts: Facts) -> list[Finding]:
    """Judge an environment.

    What fails only because of something else that is found is left out.

    Args:
        facts (Facts): What was found in it.

    Returns:
        list[Finding]: What is wrong, in the order in which to mend it.
    """
    problems = stack_problems(facts.stack, facts.importable)
    stack = [*(Finding(*problem) for problem in problems), *_mixed(facts)]
    culprits = list(_culprits(facts))
    base = [_failure(facts, step) for step in culprits if step not in STACK]
    if not any(finding.error for finding in stack):
        stack += [_failure(facts, step) for step in culprits if step in STACK]
    return [
        *_variables(facts),
        *_missing(facts),
        *base,
        *_opencv(facts),
        *_gpus(facts),
        *_pkg_resources(facts),
        *stack,
        *_checkpoints(facts),
    ]


def covers(archs: list[str], capability: tuple[int, int]) -> bool:
    """Tell whether code for some architectures runs on a GPU.

    Args:
        archs (list[str]): Of ``torch.cuda.get_arch_list()``: 'sm_80' runs on GPUs of
            the same major version from 8.0 on, 'compute_80' on all from 8.0 on, and
            'sm_90a' on 9.0 alone.
        capability (tuple[int, int]): Compute capability of the GPU.

    Returns:
        bool: Whether one of them does.
    """
    for arch in archs:
        own = _capability(arch)
        same = arch.startswith('compute') or own[0] == capability[0]
        if own == capability or (arch[-1].isdigit() and same and own < capability):
            return True
    return False


def _variables(facts: Facts) -> Iterator[Finding]:
    if facts.variables.get('MMCV_WITH_OPS') == '0':
        yield Finding(
            'MMCV_WITH_OPS=0 is set, so that mmcv builds without operators.',
            'unset MMCV_WITH_OPS',
            error=False,
        )


def _missing(facts: Facts) -> Iterator[Finding]:
    steps = [step for step, name in MODULES.items() if name not in facts.importable]
    if steps:
        be = 'is' if len(steps) == 1 else 'are'
        sentence = f'{" and ".join(steps)} {be} not installed.'
        yield Finding(sentence, install_missing(facts, steps))


def _culprits(facts: Facts) -> Iterator[str]:
    """Steps that failed although nothing is missing and all that they need works."""
    failed = set()
    for step, needs in NEEDS.items():
        if facts.error(step):
            missing = step in MODULES and MODULES[step] not in facts.importable
            if not missing and not failed.intersection(needs):
                yield step
            failed.add(step)


def _failure(facts: Facts, step: str) -> Finding:
    special = {
        'cuda': _cuda,
        'mmcv.ops': _operators,
        'mmcv.ops on cuda': _cuda_operators,
    }
    error = plain(facts.error(step))
    numpy = facts.packages.get('numpy')
    if numpy and re.search(NUMPY_ABI, error):
        old = is_original(facts.stack) or step == 'torch'
        return Finding(
            f'{step} was built for another numpy than {numpy} ({error}).',
            "pip install 'numpy<2'"
            if old and release(numpy) >= (2,)
            else reinstall(facts, step),
        )
    if step in special:
        return special[step](facts, error)
    if f"No module named '{step}'" in error:
        where = '; run this in the folder of its checkout'
        sentence = f'{step} is not installed{where if step == "condtok_mm" else ""}.'
        return Finding(sentence, reinstall(facts, step))
    why = ''
    if step == 'torchvision':
        torch = facts.steps['torch']['version']
        why = f'; it must be the one that was built for torch {torch}'
    return Finding(f'{step} does not run here ({error}){why}.', reinstall(facts, step))


def _cuda(facts: Facts, error: str) -> Finding:
    cuda = facts.steps['cuda']
    archs = cuda.get('archs', [])
    for gpu in cuda.get('gpus', []):
        capability = tuple(gpu['capability'])
        if archs and not covers(archs, capability):
            old = capability < min(map(_capability, archs))
            return Finding(
                f'torch was built for {" ".join(archs)}, and {gpu["name"]} is '
                f'sm_{capability[0]}{capability[1]}.',
                install_torch(facts, OLD_GPUS if old else newest_cuda(facts)),
            )
    return Finding(
        f'torch does not run on the GPU ({error}).',
        install_torch(facts, newest_cuda(facts)),
    )


def _operators(facts: Facts, error: str) -> Finding:
    build, torch = build_mmcv(facts.stack), facts.steps['torch']['version']
    if release(torch) >= TOO_NEW:
        return Finding(
            f'mmcv does not build against torch {torch}, and its compiled operators do '
            f'not run here ({error}).',
            f'{install_torch(facts)} && {build}',
        )
    return Finding(
        f"mmcv's compiled operators do not run here ({error}): it was built without "
        f'them, or for another torch than {torch}.',
        build,
    )


def _cuda_operators(facts: Facts, error: str) -> Finding:
    gpus = facts.steps['cuda']['gpus']
    archs = sorted({'.'.join(map(str, gpu['capability'])) for gpu in gpus})
    if 'implementation for device' in error:
        why = 'mmcv was built without its GPU operators'
    elif 'no kernel image' in error:
        why = f'mmcv was built for other GPUs than those of {" and ".join(archs)}'
    else:
        why = "mmcv's operators do not run on the GPU"
    sentence = f'{why} ({error}).'
    if not has_fitting_nvcc(facts):
        compiler = f'of CUDA {facts.nvcc}' if facts.nvcc else 'missing'
        sentence += (
            f' To build them takes the nvcc of torch, CUDA '
            f'{facts.steps["torch"]["cuda"]}, and nvcc is {compiler}: install that '
            'one, or take a wheel.'
        )
    return Finding(sentence, mmcv_for_gpus(facts, archs))


def _opencv(facts: Facts) -> Iterator[Finding]:
    wheels = {k: v for k, v in facts.packages.items() if k.startswith('opencv')}
    if len(set(wheels.values())) > 1:
        both = ' and '.join(f'{name} {number}' for name, number in wheels.items())
        name, number = max(wheels.items(), key=lambda wheel: release(wheel[1]))
        yield Finding(
            f'{both} overwrite each other.',
            f'pip uninstall -y {" ".join(wheels)} && pip install {name}=={number}',
            error=False,
        )


def _gpus(facts: Facts) -> Iterator[Finding]:
    """What keeps torch from the GPUs that the driver sees."""
    torch, cuda = facts.steps.get('torch', {}), facts.steps.get('cuda', {})
    if not facts.driver_gpus or cuda.get('gpus') != [] or torch['hip']:
        return
    command = install_torch(facts, newest_cuda(facts))
    if 'CUDA_VISIBLE_DEVICES' in facts.variables:
        value = facts.variables['CUDA_VISIBLE_DEVICES']
        sentence = f'CUDA_VISIBLE_DEVICES={value} hides the GPUs from torch.'
        command = 'unset CUDA_VISIBLE_DEVICES'
    elif not torch['cuda']:
        sentence = f'torch {torch["version"]} is built without CUDA: GPUs stay idle.'
    else:
        sentence = (
            f'torch finds no GPU: it uses CUDA {torch["cuda"]}, and driver '
            f'{facts.driver} supports CUDA up to {facts.driver_cuda}.'
        )
        if release(facts.driver_cuda or '')[:1] >= release(torch['cuda'])[:1]:
            command = "python -c 'import torch; torch.cuda.init()'  # says why"
    yield Finding(sentence, command, error=False)


def _pkg_resources(facts: Facts) -> Iterator[Finding]:
    if is_original(facts.stack) and 'pkg_resources' not in facts.importable:
        number = facts.packages.get('setuptools')
        have = f'setuptools {number} is without it' if number else 'there is none'
        yield Finding(
            f'the original stack imports pkg_resources, and {have}.',
            "pip install 'setuptools<81'",
        )


def _mixed(facts: Facts) -> Iterator[Finding]:
    """Packages of both stacks, each of them there once."""
    if any(len(packages) > 1 for packages in facts.stack.values()):
        return
    names = [name for packages in facts.stack.values() for name in packages]
    maintained = [name for name in names if name.startswith('onedl-')]
    if maintained and len(maintained) < len(names):
        yield Finding(
            f'{" and ".join(names)} are of two stacks, which are not made to fit.',
            f'pip uninstall -y {" ".join(names)} && {MAINTAINED}  # or {ORIGINAL}',
            error=any(map(facts.error, DISTRIBUTIONS)),
        )


def _checkpoints(facts: Facts) -> Iterator[Finding]:
    if facts.error('condtok_mm'):
        return
    torch = facts.steps.get('torch', {}).get('version', '')
    for path, outcome in facts.checkpoints.items():
        if 'error' in outcome:
            yield Finding(re.sub(r'^\w+Error: ', '', outcome['error']), '')
        elif outcome['needs']:
            does = 'refuses it' if release(torch) >= REFUSES else 'executes it'
            yield Finding(
                f'{path} holds more than weights ({outcome["needs"]}): torch.load of '
                f'torch {torch} {does}. The tools of this project read it; for others '
                'write its weights to a file of their own.',
                outcome['rewrite'],
                error=False,
            )


def _capability(arch: str) -> tuple[int, int]:
    return divmod(int(re.search(r'\d+', arch)[0]), 10)
