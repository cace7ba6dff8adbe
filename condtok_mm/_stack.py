"""The OpenMMLab packages that are installed, and whether they fit this one."""

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
    from packaging.version import Version  # noqa: PLC0415

    originals = (names[1] for names in DISTRIBUTIONS.values())
    remedy = ORIGINAL if any(map(_version, originals)) else MAINTAINED
    for name, (lowest, limit) in SUPPORTED.items():
        found = {
            distribution: number
            for distribution in DISTRIBUTIONS[name]
            if (number := _version(distribution))
        }
        if len(found) > 1:
            raise ImportError(
                f'{" and ".join(found)} are both installed and overwrite each other as '
                f'{name!r}. Run: pip uninstall -y {" ".join(found)}, then install one '
                f'stack: {MAINTAINED}  or  {ORIGINAL}'
            )
        if not find_spec(name):
            raise ImportError(
                f'condtok_mm needs {name} >= {lowest}, which is not installed. Run: '
                f'{remedy}'
            )
        for distribution, number in found.items():
            if not Version(lowest) <= Version(number) < Version(limit):
                raise ImportError(
                    f'condtok_mm needs {lowest} <= {name} < {limit}, but '
                    f'{distribution} {number} is installed. Run: {remedy}'
                )


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
            'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir '
            f'--force-reinstall --no-deps {_mmcv_requirement()}'
        ) from error


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _mmcv_requirement() -> str:
    for distribution in DISTRIBUTIONS['mmcv']:
        if number := _version(distribution):
            return f'{distribution}=={number}'
    return 'onedl-mmcv'
