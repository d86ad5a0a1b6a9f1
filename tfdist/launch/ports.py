"""Free loopback ports for the workers of one machine."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from tfdist.cluster.address import shorten
from tfdist.errors import UsageError

HOST = "127.0.0.1"
_LOWEST, _HIGHEST = 10_000, 65_535
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES_PER_PORT = 200


def hold_ports(count: int, stack: ExitStack, *, start_port: int | None = None) -> list[int]:
    """Picks ports on the loopback interface and holds them, so that nobody else takes them meanwhile.

    Random ones below the system's ephemeral range: from that range the system gives a port to any program
    that asks for one or that connects somewhere, also in the moment between our release and a worker's own
    use.

    Args:
        count: How many.
        stack: Closing it releases the ports.
        start_port: Take this port and those after it, instead of random ones.

    Returns:
        The ports, all different.

    Raises:
        UsageError: If `start_port` is outside 1 to 65535 or one of its ports is in use, or no port is free.
    """
    if start_port is None:
        return [_hold_free(stack) for _ in range(count)]
    last_start = _HIGHEST - count + 1
    if not isinstance(start_port, int) or isinstance(start_port, bool) or not 1 <= start_port <= last_start:
        raise UsageError(f"start_port={shorten(start_port)} has to be from 1 to {last_start} for {count} worker(s)")
    ports = list(range(start_port, start_port + count))
    for port in ports:
        try:
            _hold(port, stack)
        except OSError as error:
            raise UsageError(
                f"start_port={start_port}: port {port} cannot be used ({error.strerror or error}); give "
                "another start_port, or none to have free ones picked"
            ) from None
    return ports


def _hold(port: int, stack: ExitStack) -> int:
    # Without SO_REUSEADDR, so that two launches at once cannot hold the same port.
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.bind((HOST, port))
    return holder.getsockname()[1]


def _hold_free(stack: ExitStack) -> int:
    below = _first_ephemeral_port()
    if below - _LOWEST >= 1000:
        for _ in range(_TRIES_PER_PORT):
            try:
                return _hold(random.SystemRandom().randrange(_LOWEST, below), stack)
            except OSError:
                continue  # in use
    try:
        return _hold(0, stack)
    except OSError as error:
        raise UsageError(f"no port is free on {HOST} ({error.strerror or error}); end some other processes") from None


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49_152  # the range of IANA, which other systems use
