"""The names of mmpretrain and mmdet themselves, which every backbone here has."""

from collections.abc import Iterable

from torch import Tensor

NAME = 'OpenMMLab'


def matches(keys: Iterable[str]) -> bool:
    """Tell whether the layout can be that of a file: always.

    Args:
        keys (Iterable[str]): Keys of the backbone, without a prefix.

    Returns:
        bool: True.
    """
    return True


def convert(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the dict.

    Args:
        state_dict (dict[str, Tensor]): Weights of the backbone.

    Returns:
        dict[str, Tensor]: The same weights and names.
    """
    return dict(state_dict)
