"""The OpenMMLab packages that are installed, and whether they fit this one."""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

SUPPORTED = {
    'mmengine': ('0.10.3', '1.0.0'),
    'mmcv': ('2.0.1', '3.0.0'),
    'mmdet': ('3.3.0', '4.0.0'),
    'mmpretrain': ('1.2.0', '2.0.0'),
}
"""Import name to the lowest version that works and the first that is not known to."""

DISTRIBUTIONS = {
    'mmengine': ('onedl-mmengine', 'mmengine'),
    'mmcv': ('onedl-mmcv', 'mmcv', 'mmcv-lite'),
    'mmdet': ('onedl-mmdetection', 'mmdet'),
    'mmpretrain': ('onedl-mmpretrain', 'mmpretrain'),
}
"""Import name to the distributions that provide it; two at once break each other."""

MAINTAINED = "pip install 'condtok_mm[onedl]'"
ORIGINAL = "pip install 'condtok_mm[openmmlab]'"


def has_openmmlab() -> bool:
    """Tell whether any of mmengine, mmcv and mmdet is installed.

    Returns:
        bool: False where only the conditioning room can be used.
    """
    return any(find_spec(name) for name in ('mmengine', 'mmcv', 'mmdet'))


def check_stack() -> None:
    """Raise unless the OpenMMLab stack is complete, single and of known versions.

    Raises:
        ImportError: With what was found and the command that mends it.
    """
    importable = [name for name in SUPPORTED if find_spec(name)]
    for sentence, command in stack_problems(installed(), importable):
        raise ImportError(f'{sentence} Run: {command}')


def check_ops() -> None:
    """Raise unless mmcv's compiled operators load.

    Raises:
        ImportError: With the loader's words and the command that mends it.
    """
    try:
        import mmcv.ops  # noqa: F401, PLC0415
    except (ImportError, OSError) as error:
        raise ImportError(
            f'mmcv is installed, but its compiled operators do not load ({error}). It '
            'was built without them, or for another torch. Build it for this one: '
            f'{build_mmcv(installed())}'
        ) from error


def installed() -> dict[str, dict[str, str]]:
    """Look up the distributions of the OpenMMLab packages.

    Returns:
        dict[str, dict[str, str]]: Import name to the distributions that provide it,
            each with its version.
    """
    return {name: versions(names) for name, names in DISTRIBUTIONS.items()}


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Look up versions.

    Args:
        distributions (Iterable[str]): Names of distributions.

    Returns:
        dict[str, str]: Those that are installed, with their versions.
    """
    found = {}
    for distribution in distributions:
        with suppress(PackageNotFoundError):
            if number := version(distribution):
                found[distribution] = number
    return found


def stack_problems(
    found: dict[str, dict[str, str]], importable: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Say what keeps the OpenMMLab stack from being complete, single and known.

    Args:
        found (dict[str, dict[str, str]]): Of :func:`installed`.
        importable (Collection[str]): Import names that Python finds.

    Yields:
        tuple[str, str]: A sentence, and the command that mends it.
    """
    remedy = ORIGINAL if is_original(found) else MAINTAINED
    for name, (lowest, limit) in SUPPORTED.items():
        distributions = found[name]
        if len(distributions) > 1:
            yield (
                f'{" and ".join(distributions)} are both installed and overwrite each '
                f'other as {name!r}. Of the two stacks, {MAINTAINED} and {ORIGINAL}, '
                'only one can be installed.',
                f'pip uninstall -y {" ".join(distributions)} && {remedy}',
            )
            continue
        for distribution, number in distributions.items():
            if distribution == 'mmcv-lite':
                yield (
                    'mmcv-lite is mmcv without the compiled operators that detectors '
                    'need.',
                    'pip uninstall -y mmcv-lite && '
                    + build_mmcv(dict(mmcv=dict(mmcv=number))),
                )
            elif not release(lowest) <= release(number) < release(limit):
                yield (
                    f'condtok_mm needs {lowest} <= {name} < {limit}, but '
                    f'{distribution} {number} is installed.',
                    remedy,
                )
    if missing := [name for name in SUPPORTED if name not in importable]:
        wanted = ' and '.join(f'{name} >= {SUPPORTED[name][0]}' for name in missing)
        be = 'is' if len(missing) == 1 else 'are'
        yield f'condtok_mm needs {wanted}, which {be} not installed.', remedy


def is_original(found: dict[str, dict[str, str]]) -> bool:
    """Tell whether the original stack is in use, or some of it.

    Args:
        found (dict[str, dict[str, str]]): Of :func:`installed`.

    Returns:
        bool: False with the maintained stack, and with none.
    """
    return any(
        not distribution.startswith('onedl-')
        for distributions in found.values()
        for distribution in distributions
    )


def build_mmcv(found: dict[str, dict[str, str]]) -> str:
    """Write the command that compiles mmcv for the torch that is installed.

    Args:
        found (dict[str, dict[str, str]]): Of :func:`installed`.

    Returns:
        str: The command, for the version that is installed.
    """
    pinned = [f'{name}=={number}' for name, number in found['mmcv'].items()]
    return (
        'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir '
        f'--force-reinstall --no-deps {(pinned or ["onedl-mmcv"])[0]}'
    )


def release(number: str) -> tuple[int, ...]:
    """Split a version into numbers.

    Args:
        number (str): Such as '2.10.0+cu128'.

    Returns:
        tuple[int, ...]: The numbers before anything else, such as (2, 10, 0).
    """
    return tuple(map(int, re.findall(r'\d+', re.match(r'[\d.]*', number)[0])))
