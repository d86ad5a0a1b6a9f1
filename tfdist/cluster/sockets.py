"""Finding and binding a worker's own address, connecting, and closing connections."""

import errno
import logging
import re
import socket
import time

from tfdist.cluster.address import split_address
from tfdist.cluster.base import Cluster
from tfdist.errors import UsageError

_IP = re.compile(r"[0-9.]+|.*:.*")
_FIRST_LOOK_S, _LAST_LOOK_S = 0.2, 2.0

_log = logging.getLogger("tfdist")


def listen(cluster: Cluster, timeout_s: float) -> socket.socket:
    """Takes this worker's own address.

    Listening, and not only binding, is what shows that no other process has the port. SO_REUSEADDR makes
    connections that are still dying (TIME_WAIT) no obstacle, for this socket and for TensorFlow's after it.

    Args:
        cluster: The workers, and which of them this is.
        timeout_s: The longest time to wait for a host name to become known.

    Returns:
        A non-blocking listening socket, on that host's address only.

    Raises:
        UsageError: If the port is in use, or the host is unknown or not this machine.
    """
    host, port = split_address(cluster.address)
    refusal: OSError | None = None
    for family, kind, protocol, _, name in look_up_own(cluster, timeout_s):
        try:
            server = socket.socket(family, kind, protocol)
        except OSError as error:  # for example no IPv6 on this machine
            refusal = refusal or error
            continue
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(name)
            server.listen(128)
            server.setblocking(False)
            return server
        except OSError as error:
            server.close()
            if refusal is None or error.errno == errno.EADDRINUSE:
                refusal = error
    raise UsageError(f"{_given(cluster)} {_explain(refusal, host, port)}") from None


def look_up_own(cluster: Cluster, timeout_s: float) -> list[tuple]:
    """Looks up this worker's own address; waits for a name that is not known yet, as a new pod's may be.

    Args:
        cluster: The workers, and which of them this is.
        timeout_s: The longest time to wait. (A single look can take as long as the system's resolver does.)

    Returns:
        What `socket.getaddrinfo` returns for it.

    Raises:
        UsageError: If the name is not known in time, or can be none.
    """
    host, port = split_address(cluster.address)
    deadline, wait_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            may_come = not isinstance(error, UnicodeError) and not _IP.fullmatch(host)
            left_s = deadline - time.monotonic()
            if not may_come or left_s <= 0:
                waited = f", also after {timeout_s:.3g} s" if may_come else ""
                raise UsageError(
                    f"{_given(cluster)} the host {host} is not known here{waited} ({error}); correct its name, or use "
                    "its IP"
                ) from None
        if wait_s == _FIRST_LOOK_S:
            _log.warning(
                "this worker's host name %s is not known here yet; waiting for at most %.3g s", host, timeout_s
            )
        time.sleep(min(wait_s, left_s))
        wait_s = min(1.5 * wait_s, _LAST_LOOK_S)


def _given(cluster: Cluster) -> str:
    return f"{cluster.source} gives worker {cluster.index}, this process, the address {cluster.address}, but"


def _explain(error: OSError | None, host: str, port: int) -> str:
    code = error.errno if error else None
    if code == errno.EADDRINUSE:
        return (
            f"port {port} is in use on this machine. End the process that has it (perhaps a worker of an "
            "earlier run, or one started twice), or give this worker another port"
        )
    if code == errno.EADDRNOTAVAIL:
        return (
            f"{host} is not an address of this machine. Start this process on {host}, or correct the task "
            "index or the address"
        )
    if code == errno.EACCES:
        return f"port {port} needs rights that this process does not have. Use a port from 1024 on"
    return f"it cannot be listened on ({error}). Use another address or port"


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connects to another worker, once.

    Args:
        address: The other worker's `host:port`.
        timeout_s: The longest time to wait.

    Returns:
        A connected blocking socket.

    Raises:
        OSError: If nobody answers there.
    """
    host, port = split_address(address)
    client = socket.create_connection((host, port), timeout=timeout_s)
    # While nobody listens on a port of the ephemeral range, connecting to it can by chance pick that very
    # port for this end too, and TCP then connects the socket to itself.
    if client.getsockname() == client.getpeername():
        abort(client)
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"connected to itself at {address}")
    return client


def address_towards(host: str) -> str:
    """Finds out which of this machine's addresses is on the network towards another one; sends nothing.

    Args:
        host: The other machine's name or IP.

    Returns:
        An IP of this machine, of version 4 where the other one has such an address.

    Raises:
        OSError: If the other one's name is not known, or no network leads there.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def abort(connection: socket.socket) -> None:
    """Closes a connection at once, so that its port is not kept in TIME_WAIT.

    Args:
        connection: A connection whose data no longer matters.
    """
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    except OSError:
        pass  # already gone
    connection.close()
