"""The parameters of a data spec: `name=value` pairs after the colon."""

from typing import Any

from tfdist.config import did_you_mean
from tfdist.errors import UsageError


def parse_parameters(spec: str, text: str, allowed: dict[str, Any]) -> dict[str, Any]:
    """Returns `allowed` with the values that `text` gives.

    Args:
        spec: the whole spec, for messages.
        text: pairs such as "examples=100,shape=28x28x1".
        allowed: the parameters with their defaults, whose types tell how values are read: an int of at least 0, a
            tuple of ints joined by "x", or a word.

    Raises:
        UsageError: an unknown parameter or a value of another kind.
    """
    found = dict(allowed)
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals or name not in allowed:
            raise UsageError(
                f"--data={spec!r}: unknown parameter {pair!r}; it takes {', '.join(f'{k}=...' for k in allowed)}"
                f"{did_you_mean(name, list(allowed))}"
            )
        default = allowed[name]
        if isinstance(default, int):
            if not value.isdecimal():
                raise UsageError(f"--data={spec!r}: {name}={value!r} has to be an integer of at least 0")
            found[name] = int(value)
        elif isinstance(default, tuple):
            parts = value.split("x")
            if not all(part.isdecimal() and int(part) > 0 for part in parts):
                raise UsageError(f"--data={spec!r}: {name}={value!r} has to be sizes joined by x, such as 28x28x1")
            found[name] = tuple(map(int, parts))
        else:
            found[name] = value
    return found


def require_at_least(spec: str, name: str, value: int, least: int) -> None:
    """Raises UsageError where `value` is below `least`."""
    if value < least:
        raise UsageError(f"--data={spec!r}: {name}={value} has to be at least {least}")
