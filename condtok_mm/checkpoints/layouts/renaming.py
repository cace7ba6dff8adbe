"""Renaming the keys of a state dict."""

import re
from collections.abc import Iterable


def rename(key: str, rules: Iterable[tuple[str, str]]) -> str:
    """Apply substitutions to a key, one after the other.

    Args:
        key (str): Key of a state dict.
        rules (Iterable[tuple[str, str]]): Patterns and replacements of ``re.sub``.

    Returns:
        str: The new key.
    """
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key
