"""All workers meet once before TensorFlow starts: so that a wrong job fails early, on all, with a reason.

TensorFlow's own start waits without end for a worker that never comes, does not notice that two workers hold
different lists, and reports a port in use as a crash. So each worker first takes its own port, which shows
that it can, and worker 0 then collects one line from every other one, on the address that TensorFlow's server
will use afterwards, judges them, and gives all of them the same answer.

The workers close their connections first. The end that closes first is the one whose port stays in TIME_WAIT,
and theirs are ephemeral ones, so that the ports of the job are free when this returns.
"""

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from tfdist.cluster.address import shorten
from tfdist.cluster.base import Cluster
from tfdist.cluster.chief import collect
from tfdist.cluster.gpus import NO_GPUS, SeenGPUs
from tfdist.cluster.messages import MAX_LINE_BYTES, Hello, Reply
from tfdist.cluster.sockets import connect, listen
from tfdist.errors import UsageError

_MAX_SEED = 2**32 - 1
_CONNECT_TIMEOUT_S = 5.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0


@dataclass(frozen=True)
class Agreement:
    """What all workers agreed on.

    Attributes:
        seed: The seed of the job, the same on every worker.
        monitor: What worker 0 gave to `rendezvous`.
        sharing_gpus: The workers that see the same GPUs as the others of their host, and so divide them.
    """

    seed: int
    monitor: str | None = None
    sharing_gpus: tuple[int, ...] = ()


def rendezvous(
    cluster: Cluster,
    *,
    timeout_s: float = 120.0,
    seed: int | None = None,
    open_monitor: Callable[[str], str] | None = None,
    gpus: SeenGPUs = NO_GPUS,
) -> Agreement:
    """Meets the other workers of the job; every worker calls this before TensorFlow's server starts.

    All sockets are closed on return. Connections from anyone else are ignored. A job of one worker agrees
    with itself without touching the network. A worker whose own host name is not known yet waits for it.
    (Looking up a host name can take as long as the system's resolver does.)

    Args:
        cluster: The workers, and which of them this is.
        timeout_s: The longest time to wait for the others. The shortest of the workers' counts.
        seed: The seed this worker was given, 0 to 2**32 - 1; None takes that of the others. If none was given
            one, worker 0 draws a random one of 31 bits.
        open_monitor: Is called on worker 0 with the IP that it listens on, and returns where the workers are to hear
            of each other while they train, which is told to all.
        gpus: The GPUs that this worker sees.

    Returns:
        The agreement, the same on every worker.

    Raises:
        UsageError: If this worker's address cannot be used; or, on every worker that came up, if the workers
            hold different lists, different seeds, the same index, or different versions of TensorFlow, Keras
            or tfdist, or if a host has fewer GPUs than workers.
        PeerError: On every worker that came up, if another one did not in time; the message names it.
    """
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s < float("inf"):
        raise UsageError(f"timeout_s={shorten(timeout_s)} has to be a number of seconds above 0")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _MAX_SEED):
        raise UsageError(f"seed={shorten(seed)} has to be an integer from 0 to {_MAX_SEED}, or None")
    if cluster.num_workers == 1:
        return Agreement(secrets.randbits(31) if seed is None else seed)
    deadline = time.monotonic() + timeout_s
    with closing(listen(cluster, timeout_s)) as server:
        monitor = open_monitor(server.getsockname()[0]) if open_monitor and cluster.is_chief else None
        left_s = max(0.0, deadline - time.monotonic())
        own = Hello(cluster.index, cluster.workers, seed, timeout_s, left_s, monitor=monitor, gpus=gpus)
        reply = collect(server, own) if cluster.is_chief else _ask_chief(own, deadline)
    return Agreement(reply.agreed_seed(), reply.monitor, reply.sharing_gpus)


def _ask_chief(own: Hello, deadline: float) -> Reply:
    """Introduces this worker to worker 0, again and again until it answers or time is up."""
    chief = own.workers[0]
    trouble, retry_s = "nobody listens there", _FIRST_RETRY_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with closing(connect(chief, min(left_s, _CONNECT_TIMEOUT_S))) as connection:
                hello = replace(own, left_s=max(0.0, deadline - time.monotonic()))
                connection.sendall(hello.to_line())
                reply = Reply.from_line(_read_line(connection, deadline))
            if reply is not None:
                return reply
            trouble = "something there gave no answer of a tfdist worker"
        except OSError as error:
            trouble = error.strerror or str(error) or type(error).__name__
        time.sleep(max(0.0, min(retry_s, deadline - time.monotonic())))
        retry_s = min(1.5 * retry_s, _LAST_RETRY_S)
    return Reply(
        peer_error=f"worker 0 ({chief}) did not come up within {own.timeout_s:g} s (last: {trouble}). Look "
        "at its output, and check that every worker has the same list of workers and that the network lets "
        "them connect"
    )


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    while b"\n" not in line and len(line) <= MAX_LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(65536)
        if not received:
            break
        line += received
    return line.partition(b"\n")[0]
