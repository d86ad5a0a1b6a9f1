"""Worker 0's side of the rendezvous: hears every worker, gives all of them one answer."""

import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field

from tfdist.cluster.messages import MAX_LINE_BYTES, Hello, Reply, agree, find_conflict
from tfdist.cluster.sockets import abort

_HELLO_TIMEOUT_S = 10.0
"""How long a new connection may stay silent: a worker speaks at once."""
_CONFLICT_GRACE_S = 5.0
"""After a first disagreement, how long the rest get to come, so that they hear of it too."""
_MAX_STRANGERS = 128
_SEND_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 2.0
_TICK_S = 0.25


@dataclass
class _Connection:
    """One connection: a stranger until it has said hello.

    Attributes:
        socket: The connection.
        give_up_at: When a stranger is dropped; when a worker has to have its answer.
        received: What a stranger has sent so far.
        hello: What the worker said; None for a stranger.
    """

    socket: socket.socket
    give_up_at: float
    received: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None


def collect(server: socket.socket, own: Hello) -> Reply:
    """Waits for every other worker and answers all of them.

    A connection that ends before the answer is forgotten: a worker that was restarted may come again. Those
    that say nothing, or nothing a tfdist worker says, are dropped and hold nobody up.

    Args:
        server: The listening socket, non-blocking. It is left open.
        own: Worker 0's own hello; its `left_s` is how long to wait.

    Returns:
        The answer that all workers got.
    """
    limit = give_up_at = _answer_time(own)
    connections: list[_Connection] = []
    conflict_at: float | None = None
    reply: Reply | None = None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while reply is None:
                for key, _ in selector.select(max(0.0, min(_TICK_S, limit - time.monotonic()))):
                    if key.data is None:
                        _accept(server, selector, connections)
                    elif not _read(key.data):
                        _drop(key.data, selector, connections)
                _drop_strangers(selector, connections, limit=len(own.workers) + _MAX_STRANGERS)
                now = time.monotonic()
                workers = [connection for connection in connections if connection.hello]
                hellos = [own] + [connection.hello for connection in workers]
                conflict = find_conflict(hellos)
                conflict_at = None if conflict is None else (conflict_at or now)
                limit = min([give_up_at] + [worker.give_up_at for worker in workers])
                if conflict_at is not None:
                    limit = min(limit, conflict_at + _CONFLICT_GRACE_S)
                reply = _judge(hellos, conflict, time_is_up=now >= limit)
            _answer(reply, workers)
    finally:
        for connection in connections:
            abort(connection.socket) if connection.hello is None else connection.socket.close()
    return reply


def _judge(hellos: list[Hello], conflict: str | None, *, time_is_up: bool) -> Reply | None:
    """Returns the answer for all workers, or None to wait for more of them."""
    own = hellos[0]
    present = {hello.index for hello in hellos}
    missing = [index for index in range(len(own.workers)) if index not in present]
    if missing and not time_is_up:
        return None
    if conflict:
        return Reply(usage_error=conflict)
    if missing:
        return Reply(peer_error=_describe_missing(hellos, missing))
    seeds = [hello.seed for hello in hellos if hello.seed is not None]
    return agree(hellos, seeds[0] if seeds else secrets.randbits(31))


def _describe_missing(hellos: list[Hello], missing: list[int]) -> str:
    names = [f"worker {index} ({hellos[0].workers[index]})" for index in missing]
    timeout_s = min(hello.timeout_s for hello in hellos)
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (
        f"{', '.join(names[:8])}{rest} did not come up within {timeout_s:g} s. Look at the output there, and "
        "check that every worker has the same list of workers and that the network lets them connect"
    )


def _answer_time(hello: Hello) -> float:
    """Returns when a worker has to have its answer, a little before its own wait ends."""
    return time.monotonic() + hello.left_s - min(1.0, 0.1 * hello.left_s)


def _accept(server: socket.socket, selector: selectors.BaseSelector, connections: list[_Connection]) -> None:
    try:
        accepted, _ = server.accept()
    except OSError:
        return  # it went away again; or no more files may be open, and strangers are dropped in time
    accepted.setblocking(False)
    connection = _Connection(accepted, time.monotonic() + _HELLO_TIMEOUT_S)
    connections.append(connection)
    selector.register(accepted, selectors.EVENT_READ, connection)


def _read(connection: _Connection) -> bool:
    """Takes what came in; returns whether to keep the connection."""
    try:
        received = connection.socket.recv(65536)
    except BlockingIOError:
        return True
    except OSError:
        return False
    if not received:
        return False
    if connection.hello is not None:
        return True  # a worker has nothing more to say
    connection.received += received
    if b"\n" not in received:
        return len(connection.received) <= MAX_LINE_BYTES
    connection.hello = Hello.from_line(bytes(connection.received.partition(b"\n")[0]))
    if connection.hello is None:
        return False
    connection.give_up_at = _answer_time(connection.hello)
    return True


def _drop(connection: _Connection, selector: selectors.BaseSelector, connections: list[_Connection]) -> None:
    selector.unregister(connection.socket)
    connections.remove(connection)
    abort(connection.socket)


def _drop_strangers(selector: selectors.BaseSelector, connections: list[_Connection], *, limit: int) -> None:
    """Drops the strangers that were silent for too long, and the oldest if there are too many."""
    strangers = [connection for connection in connections if connection.hello is None]
    now = time.monotonic()
    for place, stranger in enumerate(strangers):
        if now >= stranger.give_up_at or place < len(strangers) - limit:
            _drop(stranger, selector, connections)


def _answer(reply: Reply, workers: list[_Connection]) -> None:
    """Sends the answer to all, then waits until they have closed, so that the dying ports are theirs."""
    line = reply.to_line()
    for worker in workers:
        try:
            worker.socket.settimeout(_SEND_TIMEOUT_S)
            worker.socket.sendall(line)
        except OSError:
            pass  # it went away; TensorFlow's start will name it
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    for worker in workers:
        try:
            while True:
                worker.socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not worker.socket.recv(65536):
                    break
        except OSError:
            pass  # it went away, or takes too long
