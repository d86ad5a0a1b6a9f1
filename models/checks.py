"""Checks of a model's configuration; each raises UsageError with argument, value and what is allowed."""

from collections.abc import Sequence
from typing import Any

from tfdist.errors import UsageError


def positive(**values: Any) -> None:
    """Checks that every value is an integer of at least 1.

    Args:
        **values: The arguments by name.

    Raises:
        UsageError: If one is not.
    """
    for name, value in values.items():
        if not _is_int(value) or value < 1:
            raise UsageError(f"{name}={value!r} has to be an integer of at least 1")


def each_positive(**values: Any) -> None:
    """Checks that every value is a tuple or list, not empty, of integers of at least 1.

    Args:
        **values: The arguments by name.

    Raises:
        UsageError: If one is not.
    """
    for name, value in values.items():
        if not isinstance(value, (tuple, list)) or not value or not all(_is_int(v) and v >= 1 for v in value):
            raise UsageError(f"{name}={value!r} has to be a tuple of integers of at least 1")


def image(image_shape: Any, *, multiple: int = 1, smallest: int = 1) -> None:
    """Checks a shape (height, width, channels).

    Args:
        image_shape: The shape.
        multiple: What height and width have to be a multiple of.
        smallest: The smallest height and width.

    Raises:
        UsageError: If it cannot be right.
    """
    each_positive(image_shape=image_shape)
    if len(image_shape) != 3:
        raise UsageError(f"image_shape={tuple(image_shape)} has to be (height, width, channels)")
    if any(size < smallest for size in image_shape[:2]):
        raise UsageError(f"image_shape={tuple(image_shape)}: height and width have to be at least {smallest}")
    if any(size % multiple for size in image_shape[:2]):
        raise UsageError(f"image_shape={tuple(image_shape)}: height and width have to be multiples of {multiple}")


def rate(**values: Any) -> None:
    """Checks that every value is a number from 0 to below 1.

    Args:
        **values: The arguments by name.

    Raises:
        UsageError: If one is not.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise UsageError(f"{name}={value!r} has to be a number from 0 to below 1")


def one_of(choices: Sequence[Any], **values: Any) -> None:
    """Checks that every value is one of the choices.

    Args:
        choices: What is allowed.
        **values: The arguments by name.

    Raises:
        UsageError: If one is not.
    """
    for name, value in values.items():
        if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
            raise UsageError(f"{name}={value!r} has to be one of {', '.join(map(repr, choices))}")


def divisible(dividend: str, dividend_value: int, divisor: str, divisor_value: int) -> None:
    """Checks that one argument is a multiple of another.

    Args:
        dividend: The name of the first.
        dividend_value: Its value.
        divisor: The name of the second.
        divisor_value: Its value.

    Raises:
        UsageError: If it is not.
    """
    if dividend_value % divisor_value:
        raise UsageError(f"{dividend}={dividend_value} has to be a multiple of {divisor}={divisor_value}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
