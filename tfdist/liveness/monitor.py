"""The one place that hears every worker's heartbeats, judges them, and tells all workers."""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfdist.liveness.beat import Beat, Lines, is_count, to_line
from tfdist.liveness.judge import Limits, Seen, Verdict, judge, suspect

BEAT_S = 0.5
"""Seconds between two heartbeats, of a worker and of the monitor itself."""
_HELLO_S = 10.0
_LONGEST_S = 1e9
_MOST_STRANGERS = 64


@dataclass
class _Connection:
    """One connection; a stranger until it has said who it is."""

    socket: socket.socket
    since: float
    lines: Lines = field(default_factory=Lines)
    index: "int | None" = None


@dataclass
class _Worker:
    """What the monitor knows of one worker."""

    name: str
    beat: "Beat | None" = None
    heard: float = 0.0
    connection: "_Connection | None" = None
    left: bool = False
    failed: "str | None" = None
    for_good: bool = False
    held: "tuple[int, int] | None" = None
    first_step: "int | None" = None


class Monitor:
    """Listens to the workers of one job in a thread of its own.

    It runs in the launcher where there is one, which outlives every worker; else in worker 0.

    Attributes:
        saves: Whether a training of the job has had checkpoints to go on from.
        trains_unsaved: Whether one has had none.

    Args:
        workers: The workers' addresses, for messages.
        host: The IP to listen on; only the job's workers know the port and the token.
        name: What the workers call that IP; None for itself.
        limits: How patient it is. A worker that was given a limit of its own sets it for all.
    """

    def __init__(
        self, workers: Sequence[str], *, host: str, name: "str | None" = None, limits: "Limits | None" = None
    ) -> None:
        self.limits = limits or Limits()
        self._workers = [_Worker(name) for name in workers]
        self._token = secrets.token_hex(16)
        self._verdict: Verdict | None = None
        self._stop: dict[str, Any] | None = None
        self._asked: str | None = None
        self.saves = self.trains_unsaved = False
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()
        self._closed = self._failed_by_others = False
        self._patient_until = 0.0
        self._beat_at = time.monotonic() + BEAT_S
        self._wake, self._woken = socket.socketpair()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=max(128, len(workers)))
        self._server.setblocking(False)
        name = name or host
        shown = f"[{name}]" if ":" in name else name
        self.address = f"{shown}:{self._server.getsockname()[1]}/{self._token}"
        self._thread = threading.Thread(target=self._run, name="tfdist-monitor", daemon=True)
        self._thread.start()

    @property
    def verdict(self) -> "Verdict | None":
        """Why the job cannot go on; None while it can."""
        return self._verdict

    def seen(self) -> list[Seen]:
        """Returns what is known of each worker now."""
        now = time.monotonic()
        now -= max(0.0, now - self._beat_at)  # while this process was stopped, it could hear nobody
        with self._lock:
            return [
                Seen(
                    index,
                    worker.name,
                    worker.beat,
                    silent_s=max(0.0, now - worker.heard) if worker.beat is not None else 0.0,
                    connected=worker.connection is not None,
                    left=worker.left,
                    failed=worker.failed,
                    for_good=worker.for_good,
                )
                for index, worker in enumerate(self._workers)
            ]

    def steps(self) -> "tuple[int, int] | None":
        """Returns the step at which training began, and the last one reached; None before the first."""
        with self._lock:
            begun = [worker.first_step for worker in self._workers if worker.first_step is not None]
            reached = [worker.beat.step for worker in self._workers if worker.beat is not None]
        return (min(begun), max(reached)) if begun else None

    def suspect(self) -> "Verdict | None":
        """Says who misses heartbeats, where something has failed already."""
        return self._verdict or suspect(self.seen())

    def condemn(self, verdict: Verdict) -> None:
        """Tells all workers that the job cannot go on."""
        with self._lock:
            if self._verdict is None:
                self._verdict = verdict
                self._tell_all(verdict.to_message())

    def ask_to_stop(self, why: str) -> bool:
        """Lets the workers stop at a step that all of them can reach, and save.

        Returns:
            Whether they will: those that train must be able to save.
        """
        beats = [seen.beat for seen in self.seen() if seen.matters]
        if not beats or not all(beat.saves for beat in beats):
            return False
        with self._lock:
            if self._asked is None:
                self._asked = why
                self._tell_all({"type": "hold"})
        return True

    def close(self) -> None:
        """Tells the workers that it ends, and ends."""
        with self._lock:
            self._tell_all({"type": "end"})
            self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(5)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                ready = selector.select(max(0.0, self._beat_at - time.monotonic()))
                if (late_s := time.monotonic() - self._beat_at) > self.limits.pause:
                    # This process was stopped: what the others have said meanwhile is still to be read, and they may
                    # themselves have waited for it to take what they print.
                    self._patient_until = time.monotonic() + min(late_s, self.limits.hang_timeout) + 2 * BEAT_S
                for key, _ in ready:
                    if key.fileobj is self._server:
                        self._accept(selector)
                    elif key.data is not None:
                        self._read(key.data, selector)
                if time.monotonic() >= self._beat_at:
                    self._beat_at = time.monotonic() + BEAT_S
                    with self._lock:
                        self._tell_all({"type": "beat"})
                self._judge()
                self._drop_strangers(selector)
        for connection in self._connections:
            connection.socket.close()
        for end in (self._server, self._wake, self._woken):
            end.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(accepted, time.monotonic())
        self._connections.append(connection)
        selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        try:
            data = connection.socket.recv(65536)
            messages = connection.lines.feed(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            messages = None
        if messages is None:
            self._drop(connection, selector)
            return
        for message in messages:
            if connection.index is None and not self._introduced(connection, message):
                self._drop(connection, selector)
                return
            with self._lock:
                self._take(connection, message)

    def _introduced(self, connection: _Connection, message: dict[str, Any]) -> bool:
        index = message.get("index")
        token = str(message.get("token")).encode(errors="replace")
        known = message.get("type") == "hello" and secrets.compare_digest(token, self._token.encode())
        if not known or not is_count(index) or index >= len(self._workers):
            return False
        wished = message.get("hang_timeout")
        if isinstance(wished, int | float) and 1 <= wished < _LONGEST_S:
            self.limits = replace(self.limits, hang_timeout=float(wished))
        with self._lock:
            worker = self._workers[index]
            connection.index, worker.connection, worker.heard = index, connection, time.monotonic()
            worker.name = f"{worker.name}, process {message.get('pid')} on {message.get('host')}"
            self._tell(connection, {"type": "welcome", "hang_timeout": self.limits.hang_timeout})
            if self._verdict is not None:
                self._tell(connection, self._verdict.to_message())
            if self._asked is not None:
                self._tell(connection, self._stop or {"type": "hold"})
        return True

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        worker = self._workers[connection.index]
        worker.heard = time.monotonic()
        kind = message.get("type")
        if kind == "beat":
            beat = Beat.from_message(message)
            if beat is not None:
                if beat.phase in ("trace", "first", "step"):
                    self.trains_unsaved |= not beat.saves
                    if worker.first_step is None:
                        worker.first_step = beat.step
                worker.beat = beat
                self.saves |= beat.saves
                if beat.in_training:
                    worker.failed, worker.for_good = None, False
        elif kind == "failed":
            if message.get("by_others"):
                worker.left = True
                self._failed_by_others = True
            else:
                worker.failed = str(message.get("why"))[:500]
                worker.for_good = message.get("for_good") is True
        elif kind == "bye":
            worker.left = True
        elif kind == "stop" and self._asked is None:
            self._asked = f"worker {connection.index} got {message.get('why')}"
            self._tell_all({"type": "hold"})
        elif kind == "held" and is_count(message.get("begun")) and is_count(message.get("done")):
            worker.held = message["begun"], message["done"]
        self._agree()

    def _agree(self) -> None:
        """Finds the call after which all stop, where asked for, when all have told how many they have begun."""
        if self._asked is None or self._stop is not None:
            return
        here = [worker for worker in self._workers if worker.connection is not None and not worker.left]
        if not here or any(worker.held is None for worker in here):
            return
        after = max(worker.held[0] for worker in here)
        # Where no call has come back on any worker, all is as the last checkpoint has it.
        nothing_done = all(worker.held[1] == 0 for worker in here)
        self._stop = {"type": "stop", "after": after, "at_once": nothing_done, "why": self._asked}
        self._tell_all(self._stop)

    def _judge(self) -> None:
        if self._verdict is None:
            verdict = suspect(self.seen()) if self._failed_by_others else None
            verdict = verdict or judge(self.seen(), self.limits)
            patient = time.monotonic() < self._patient_until
            if verdict is not None and (verdict.kind == "lost" or not patient):
                self.condemn(verdict)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for worker in self._workers:
            if worker.connection is not None:
                self._tell(worker.connection, message)

    def _tell(self, connection: _Connection, message: dict[str, Any]) -> None:
        # Lines are short and a worker reads all the time: one whose buffer is full is stopped, and hears nothing.
        with contextlib.suppress(OSError):
            connection.socket.send(to_line(message))

    def _drop(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)
        if connection.index is not None:
            with self._lock:
                worker = self._workers[connection.index]
                if worker.connection is connection:
                    worker.connection = None
                self._agree()

    def _drop_strangers(self, selector: selectors.BaseSelector) -> None:
        strangers = [connection for connection in self._connections if connection.index is None]
        too_many = len(strangers) - _MOST_STRANGERS
        for place, stranger in enumerate(strangers):
            if place < too_many or time.monotonic() - stranger.since > _HELLO_S:
                self._drop(stranger, selector)
