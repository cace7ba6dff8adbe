"""What a layout is."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names that files give to the weights of a backbone.

    Attributes:
        name (str): What reports call it.
        pattern (str): Regular expression that some key matches from its beginning.
        rules (tuple[tuple[str, str], ...]): Patterns and replacements of ``re.sub``,
            applied to every key in turn, that lead to mmpretrain's and mmdet's names.
        prepare (Callable): Turns the state dict into one for which renaming is enough.
    """

    name: str
    pattern: str
    rules: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[dict], dict] = dict

    def matches(self, keys: Iterable[str]) -> bool:
        """Tell whether keys may be those of this layout.

        Args:
            keys (Iterable[str]): Keys of the backbone, without a prefix.

        Returns:
            bool: Whether they may.
        """
        return any(re.match(self.pattern, key) for key in keys)

    def convert(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the weights as mmpretrain and mmdet do.

        Args:
            state_dict (dict[str, Tensor]): Weights of the backbone.

        Returns:
            dict[str, Tensor]: The weights under new names.
        """
        return {self._rename(k): v for k, v in self.prepare(state_dict).items()}

    def _rename(self, key: str) -> str:
        for pattern, replacement in self.rules:
            key = re.sub(pattern, replacement, key)
        return key
