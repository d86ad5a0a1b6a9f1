"""How the workers of `tfdist doctor` talk: JSON lines over TCP, each wait with a limit that names the peer."""

import json
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from tfdist.cluster.base import Cluster
from tfdist.cluster.sockets import abort, connect, listen
from tfdist.errors import PeerError

PROTOCOL = "tfdist-doctor-1"
MOST_BYTES = 8 << 20
"""The most that one transfer measures."""
_MAX_LINE_BYTES, _MAX_FIRST_BYTES = 32 << 20, 1 << 20
_SILENCE_S = 10.0
_POLL_S = 0.2
_CHUNK = bytes(1 << 18)


class Channel:
    """A connection on which both sides send JSON lines.

    Args:
        connection: the connected socket; the channel closes it.
        peer: who is at the other end, for messages.
    """

    def __init__(self, connection: socket.socket, peer: str):
        self._socket = connection
        self._peer = peer
        self._received = bytearray()
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, address: str, peer: str, timeout_s: float) -> "Channel":
        """Connects to another worker.

        Args:
            address: its `host:port`.
            peer: its name for messages.
            timeout_s: the longest time to wait.

        Raises:
            PeerError: nobody answers there.
        """
        try:
            return cls(connect(address, timeout_s), peer)
        except OSError as error:
            raise PeerError(f"{peer} cannot be reached: {_reason(error, timeout_s)}") from None

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Sends one message.

        Raises:
            PeerError: the peer does not take it.
        """
        self._send(json.dumps(message).encode("ascii") + b"\n", timeout_s)

    def receive(self, timeout_s: float, most: int = _MAX_LINE_BYTES) -> dict[str, Any]:
        """Waits for one message, of `most` bytes at most.

        Raises:
            PeerError: none comes in time, or none that can be read.
        """
        deadline = time.monotonic() + timeout_s
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > most:
                raise PeerError(f"{self._peer} sent more than a message can hold")
            self._received += self._read(deadline, timeout_s)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise PeerError(f"{self._peer} sent something that is no message of tfdist doctor")
        return message

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends one message and waits for the answer.

        Raises:
            PeerError: there is none.
        """
        self.send(message, timeout_s)
        return self.receive(timeout_s)

    def pour(self, count: int, timeout_s: float) -> None:
        """Sends `count` bytes.

        Raises:
            PeerError: the peer does not take them in time.
        """
        deadline = time.monotonic() + timeout_s
        for start in range(0, count, len(_CHUNK)):
            self._send(_CHUNK[: count - start], max(0.001, deadline - time.monotonic()))

    def drain(self, count: int, timeout_s: float) -> None:
        """Takes `count` bytes.

        Raises:
            PeerError: they do not come in time.
        """
        deadline = time.monotonic() + timeout_s
        left = count - len(self._received)
        self._received.clear()
        while left > 0:
            left -= len(self._read(deadline, timeout_s, most=min(left, len(_CHUNK))))

    def _send(self, data: bytes, timeout_s: float) -> None:
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(data)
        except OSError as error:
            raise PeerError(f"{self._peer} went away: {_reason(error, timeout_s)}") from None

    def _read(self, deadline: float, timeout_s: float, most: int = len(_CHUNK)) -> bytes:
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            received = self._socket.recv(most)
        except OSError as error:
            raise PeerError(f"{self._peer} does not answer: {_reason(error, timeout_s)}") from None
        if not received:
            raise PeerError(f"{self._peer} went away: it closed the connection")
        return received


class Server:
    """Answers on a worker's own address, in threads, until it is closed.

    It tells the time, takes bytes, and hands those that join over to the chief. Whoever says nothing of the kind is
    dropped.

    Args:
        cluster: the job, and which worker this is.
        most: how many connections it holds at a time; more are refused.
        timeout_s: how long to wait for this worker's host name to become known.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, cluster: Cluster, most: int, timeout_s: float = 0.0):
        self.joined: queue.Queue[tuple[dict[str, Any], Channel]] = queue.Queue()
        self._index = cluster.index
        self._places = threading.Semaphore(most)
        self._closed = threading.Event()
        self._listener = listen(cluster, timeout_s)
        self._listener.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening."""
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody came just now, or went away again
                continue
            if not self._places.acquire(blocking=False):
                abort(connection)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, "the other end")
        kept = False
        try:
            while not kept and not self._closed.is_set():
                message = channel.receive(_SILENCE_S, _MAX_FIRST_BYTES)
                if message.get("protocol") != PROTOCOL:
                    return
                kept = self._answer(message, channel)
        except PeerError:
            pass  # it has gone, or speaks of something else
        finally:
            self._places.release()
            if not kept:
                channel.close()

    def _answer(self, message: dict[str, Any], channel: Channel) -> bool:
        """Answers one message; returns whether the channel was handed over."""
        count = message.get("bytes")
        match message.get("op"):
            case "join":
                self.joined.put((message, channel))
                return True
            case "time":
                channel.send({"index": self._index, "time": time.time()}, _SILENCE_S)
            case "take" if isinstance(count, int) and 0 < count <= MOST_BYTES:
                channel.drain(count, _SILENCE_S)
                channel.send({"index": self._index, "bytes": count}, _SILENCE_S)
            case _:
                raise PeerError("not a message that is known here")
        return False


def _reason(error: OSError, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:.3g} s"
    return error.strerror or str(error) or type(error).__name__
