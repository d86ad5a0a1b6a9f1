"""Worker addresses of the form `host:port`: parsing, and showing them in messages."""

import re
from collections.abc import Iterable

from tfdist.errors import UsageError

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]):(?P<port>[1-9][0-9]{0,4})")
MAX_PORT = 65535
"""The highest number of a port."""


def split_address(address: object) -> tuple[str, int]:
    """Splits `host:port` (or `[ipv6]:port`) into its two parts.

    Args:
        address: The address of one worker.

    Returns:
        The host, without the brackets of an IPv6 address, and the port.

    Raises:
        UsageError: If `address` is not a string of that form or its port is not 1 to 65535.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or int(match["port"]) > MAX_PORT:
        raise UsageError(
            f"the worker address {shorten(address)} is not of the form host:port with a port from 1 to "
            f"{MAX_PORT}; write it as 'host1:12345' or '10.0.0.1:12345' ('[fe80::1]:12345' for IPv6)"
        )
    return match["host"].strip("[]"), int(match["port"])


def check_addresses(addresses: Iterable[object]) -> None:
    """Checks that every address is well-formed and that no two are the same.

    Args:
        addresses: The addresses of all workers, worker 0 first.

    Raises:
        UsageError: If one is not of the form `host:port`, or if two are equal.
    """
    seen: dict[tuple[str, int], int] = {}
    for index, address in enumerate(addresses):
        host, port = split_address(address)
        first = seen.setdefault((host.lower(), port), index)
        if first != index:
            raise UsageError(
                f"workers {first} and {index} have the same address {shorten(address)}; "
                "each worker needs a host and port of its own"
            )


def group_by_host(addresses: Iterable[str]) -> list[tuple[int, ...]]:
    """Finds out which workers share a host, as the addresses name hosts.

    Args:
        addresses: The well-formed addresses of all workers, worker 0 first.

    Returns:
        The indices of the workers of each host.
    """
    hosts: dict[str, list[int]] = {}
    for index, address in enumerate(addresses):
        hosts.setdefault(split_address(address)[0].lower(), []).append(index)
    return [tuple(workers) for workers in hosts.values()]


def shorten(value: object, limit: int = 200) -> str:
    """Shows a value in a message: as Python writes it, cut in the middle when long.

    Args:
        value: Anything; strings that are not printable come out escaped.
        limit: The longest text to return.

    Returns:
        One line of at most `limit` characters.
    """
    if isinstance(value, str) and len(value) > 2 * limit:
        value = value[:limit] + value[-limit:]  # the middle is cut below in any case
    try:
        return cut(ascii(value), limit)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        return f"a {type(value).__name__} too large to show"


def cut(text: str, limit: int) -> str:
    """Cuts the middle out of a text that is too long.

    Args:
        text: The text.
        limit: The longest text to return, at least 10.

    Returns:
        The text, or its start and end joined by three dots.
    """
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
