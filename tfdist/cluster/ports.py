"""Free ports for the workers on this machine."""

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


def hold_ports(count: int, stack: ExitStack, *, start_port: int | None = None, host: str = HOST) -> list[int]:
    """Picks ports of this machine and holds them, so that nobody else takes them meanwhile.

    Random ones below the system's ephemeral range: from that range the system gives a port to any program
    that asks for one or that connects somewhere, also in the moment between our release and a worker's own
    use.

    Args:
        count: How many.
        stack: Closing it releases the ports.
        start_port: Take this port and those after it, instead of random ones.
        host: An address of this machine; by default that of the loopback interface.

    Returns:
        The ports, all different.

    Raises:
        UsageError: If `start_port` is outside 1 to 65535 or one of its ports is in use, or no port is free.
    """
    if start_port is None:
        return [_hold_free(host, stack) for _ in range(count)]
    last_start = _HIGHEST - count + 1
    if not isinstance(start_port, int) or isinstance(start_port, bool) or not 1 <= start_port <= last_start:
        raise UsageError(f"start_port={shorten(start_port)} has to be from 1 to {last_start} for {count} worker(s)")
    ports = list(range(start_port, start_port + count))
    for port in ports:
        try:
            _hold(host, port, stack)
        except OSError as error:
            raise UsageError(
                f"start_port={start_port}: port {port} cannot be used ({error.strerror or error}); give "
                "another start_port, or none to have free ones picked"
            ) from None
    return ports


def _hold(host: str, port: int, stack: ExitStack) -> int:
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    # With it, connections that have ended may still have the port: a worker that was killed leaves such ones for a
    # minute. As the port is listened on, two launches at once cannot hold it all the same.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, port))
    holder.listen(1)
    return holder.getsockname()[1]


def _hold_free(host: str, stack: ExitStack) -> int:
    below = _first_ephemeral_port()
    if below - _LOWEST >= 1000:
        for _ in range(_TRIES_PER_PORT):
            try:
                return _hold(host, random.SystemRandom().randrange(_LOWEST, below), stack)
            except OSError:
                continue  # in use
    try:
        return _hold(host, 0, stack)
    except OSError as error:
        raise UsageError(f"no port is free on {host} ({error.strerror or error}); end some other processes") from None


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49_152  # the range of IANA, which other systems use
