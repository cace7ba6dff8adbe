"""Checks of arguments, with errors that say which, what is allowed and the value."""

import numbers
import sys
import textwrap
from collections.abc import Collection, Sequence

LARGEST = sys.float_info.max
"""An integer can be finite and too large for a float."""


def check_number(name: str, value: object, interval: str) -> None:
    """Raise unless an argument is a number in an interval.

    Args:
        name (str): Name of the argument.
        value (object): What was given.
        interval (str): Such as '(0, 1]'; a round bracket leaves its end out.

    Raises:
        TypeError: If it is not a number; booleans are none.
        ValueError: If it lies outside.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f'{name} must be a number in {interval}, but got {shown(value)}.'
        )
    least, most = map(float, interval[1:-1].split(','))
    most = min(most, LARGEST)
    above = least <= value if interval[0] == '[' else least < value
    below = value <= most if interval[-1] == ']' else value < most
    if not (above and below):
        raise ValueError(f'{name} must lie in {interval}, but got {shown(value)}.')


def check_integer(
    name: str, value: object, least: int, most: int | None = None
) -> None:
    """Raise unless an argument is an integer in a range.

    Args:
        name (str): Name of the argument.
        value (object): What was given.
        least (int): Smallest that is allowed.
        most (int, optional): Largest that is allowed. Defaults to None, no limit.

    Raises:
        TypeError: If it is not an integer; booleans are none.
        ValueError: If it lies outside.
    """
    allowed = f'an integer {_range(least, most)}'
    if not _is_integer(value):
        raise TypeError(f'{name} must be {allowed}, but got {shown(value)}.')
    if not _inside(value, least, most):
        raise ValueError(f'{name} must be {allowed}, but got {shown(value)}.')


def check_integers(
    name: str,
    value: object,
    least: int,
    most: int | None = None,
    length: int | None = None,
) -> None:
    """Raise unless an argument is a sequence of integers in a range.

    Args:
        name (str): Name of the argument.
        value (object): What was given.
        least (int): Smallest that is allowed.
        most (int, optional): Largest that is allowed. Defaults to None, no limit.
        length (int, optional): How many there must be. Defaults to None, at least one.

    Raises:
        TypeError: If it is not a sequence of integers.
        ValueError: If one lies outside, or there are too few or too many.
    """
    count = '' if length is None else f'{length} '
    allowed = f'a sequence of {count}integers {_range(least, most)}'
    sequence = isinstance(value, Sequence) and not isinstance(value, str)
    if not sequence or not all(map(_is_integer, value)):
        raise TypeError(f'{name} must be {allowed}, but got {shown(value)}.')
    fits = len(value) > 0 if length is None else len(value) == length
    if not fits or not all(_inside(item, least, most) for item in value):
        raise ValueError(f'{name} must be {allowed}, but got {shown(value)}.')


def check_size(name: str, value: object) -> None:
    """Raise unless an argument is an integer from 1 on, or a pair of them.

    Args:
        name (str): Name of the argument.
        value (object): What was given.

    Raises:
        TypeError: If it is neither.
        ValueError: If one is below 1, or there are not two.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        check_integers(name, value, 1, length=2)
    else:
        check_integer(name, value, 1)


def check_flag(name: str, value: object) -> None:
    """Raise unless an argument is a boolean.

    Args:
        name (str): Name of the argument.
        value (object): What was given.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f'{name} must be True or False, but got {shown(value)}.')


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless an argument is one of some names.

    Args:
        name (str): Name of the argument.
        value (object): What was given.
        choices (Collection[str]): The names.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, str) or value not in choices:
        known = ', '.join(map(repr, choices))
        raise ValueError(f'{name} must be one of {known}, but got {shown(value)}.')


def check_type(name: str, value: object, kind: type, allowed: str) -> None:
    """Raise unless an argument has a type.

    Args:
        name (str): Name of the argument.
        value (object): What was given.
        kind (type): The type.
        allowed (str): The type in words, with its article.

    Raises:
        TypeError: If it has another.
    """
    if not isinstance(value, kind):
        raise TypeError(f'{name} must be {allowed}, but got {shown(value)}.')


def check_pad_value(value: object) -> None:
    """Raise unless an argument ``pad_value`` is a pixel value.

    Args:
        value (object): What was given.

    Raises:
        TypeError: If it is neither a number nor a list or tuple of numbers.
        ValueError: If one is not finite, or there is none.
    """
    allowed = 'finite, one number or one for each channel'
    channels = value if isinstance(value, list | tuple) else [value]
    for channel in channels:
        if isinstance(channel, bool) or not isinstance(channel, numbers.Real):
            raise TypeError(f'pad_value must be {allowed}, but got {shown(value)}.')
    if not channels or not all(abs(channel) <= LARGEST for channel in channels):
        raise ValueError(f'pad_value must be {allowed}, but got {shown(value)}.')


def shown(value: object) -> str:
    """What was given, as an error shows it: on one line, and not too long.

    Args:
        value (object): Anything.

    Returns:
        str: Its ``repr``, shortened.
    """
    return textwrap.shorten(repr(value), 200, placeholder=' ...')


def _range(least: int, most: int | None) -> str:
    return f'>= {least}' if most is None else f'in [{least}, {most}]'


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _inside(value: int, least: int, most: int | None) -> bool:
    return least <= value and (most is None or value <= most)
