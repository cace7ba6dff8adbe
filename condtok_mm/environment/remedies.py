"""The commands that mend an environment."""

from .._stack import DISTRIBUTIONS, SUPPORTED, build_mmcv, is_original, release
from .facts import Facts

TESTED = {True: ('2.4.1', '0.19.1'), False: ('2.10.0', '0.25.0')}
"""Versions of torch and torchvision with the original stack, and the maintained one."""

TOO_NEW = (2, 14)
"""First torch that mmcv does not compile against."""

WHEELS = {(11, 8), (12, 1), (12, 4), (12, 6), (12, 8), (13, 0)}
"""CUDA versions that PyTorch's own index has wheels for."""

OLD_GPUS = (12, 6)
"""Of these, one whose wheels still hold code for old GPUs."""

ANEW = 'pip install --force-reinstall --no-deps --no-cache-dir'


def install_missing(facts: Facts, steps: list[str]) -> str:
    """Install what the OpenMMLab packages stand on.

    Args:
        facts (Facts): What was found.
        steps (list[str]): Names of the steps that lack their package.

    Returns:
        str: A command.
    """
    original = is_original(facts.stack)
    torch, torchvision = TESTED[original]
    requirements = dict(
        numpy="'numpy<2'" if original else 'numpy',
        torch=f'torch=={torch}',
        torchvision=f'torchvision=={torchvision}',
        opencv="'opencv-python<4.12'" if original else 'opencv-python',
        pycocotools='pycocotools',
    )
    if 'torch' not in steps and 'torchvision' in steps:
        requirements['torchvision'] = _fitting_torchvision(facts)
    return f'pip install {" ".join(requirements[step] for step in steps)}'


def reinstall(facts: Facts, step: str) -> str:
    """Install anew what a step tries.

    Args:
        facts (Facts): What was found.
        step (str): Its name.

    Returns:
        str: A command.
    """
    if step == 'torch':
        return install_torch(facts)
    if step == 'opencv':
        return _headless_opencv(facts)
    if step == 'mmcv':
        return build_mmcv(facts.stack)
    if step in DISTRIBUTIONS:
        name = [*facts.stack[step], *DISTRIBUTIONS[step]][0]
        lowest, limit = SUPPORTED[step]
        return f"{ANEW} '{name}>={lowest},<{limit}'"
    requirements = dict(
        numpy="'numpy<2'" if is_original(facts.stack) else 'numpy',
        torchvision=_fitting_torchvision(facts),
        pycocotools='pycocotools',
        condtok_mm='--no-build-isolation -e .',
    )
    return f'{ANEW} {requirements[step]}'


def install_torch(facts: Facts, cuda: tuple[int, int] | None = None) -> str:
    """Install torch and torchvision.

    Args:
        facts (Facts): What was found.
        cuda (tuple[int, int] | None): CUDA version that they are to use; None takes
            the versions that this project is tested with, for any.

    Returns:
        str: A command.
    """
    if cuda:
        limit = '.'.join(map(str, TOO_NEW))
        return (
            f"pip install --force-reinstall 'torch<{limit}' torchvision "
            f'--index-url https://download.pytorch.org/whl/cu{cuda[0]}{cuda[1]}'
        )
    torch, torchvision = TESTED[is_original(facts.stack)]
    return f'pip install --force-reinstall torch=={torch} torchvision=={torchvision}'


def newest_cuda(facts: Facts) -> tuple[int, int] | None:
    """Choose CUDA for the driver.

    Args:
        facts (Facts): What was found.

    Returns:
        tuple[int, int] | None: The newest version with wheels of torch that the driver
            supports; None if there is none.
    """
    limit = release(facts.driver_cuda or '')
    return max((cuda for cuda in WHEELS if cuda <= limit), default=None)


def mmcv_for_gpus(facts: Facts, archs: list[str]) -> str:
    """Install mmcv with its GPU operators.

    Args:
        facts (Facts): What was found.
        archs (list[str]): Compute capabilities of the GPUs, such as '9.0'.

    Returns:
        str: The command that compiles it, where there is the nvcc for it; else the one
            that looks for a wheel.
    """
    build = build_mmcv(facts.stack)
    if has_fitting_nvcc(facts):
        return f"FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST='{';'.join(archs)}' {build}"
    mim = 'openmim' if is_original(facts.stack) else 'onedl-mim'
    return f'pip install -U {mim} && mim install {build.split()[-1]}'


def has_fitting_nvcc(facts: Facts) -> bool:
    """Tell whether nvcc can compile for torch.

    Args:
        facts (Facts): What was found.

    Returns:
        bool: Whether it is there, and of the major version of torch's CUDA.
    """
    cuda = facts.steps.get('torch', {}).get('cuda')
    return release(facts.nvcc or '')[:1] == release(cuda or '-')[:1] != ()


def _fitting_torchvision(facts: Facts) -> str:
    """The torchvision of the torch that is there: 0.N + 15 belongs to 2.N."""
    torch = facts.steps.get('torch', {}).get('version') or facts.packages.get('torch')
    if not torch:
        return 'torchvision'
    number, _, build = torch.partition('+')
    major, minor, *_ = release(number)
    index = f' --index-url https://download.pytorch.org/whl/{build}' if build else ''
    return f"'torchvision=={major - 2}.{minor + 15}.*'{index}"


def _headless_opencv(facts: Facts) -> str:
    """OpenCV without libraries of a desktop, in place of any other."""
    wheels = [name for name in facts.packages if name.startswith('opencv')]
    remove = f'pip uninstall -y {" ".join(wheels)} && ' if wheels else ''
    limit = '<4.12' if is_original(facts.stack) else ''
    return f"{remove}pip install 'opencv-python-headless{limit}'"
