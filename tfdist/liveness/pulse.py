"""A worker's side of the monitor: it tells what the worker does, and does what the job has to do."""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tfdist.cluster.sockets import connect
from tfdist.errors import EXIT_FAILED, EXIT_REQUEUE, PeerError
from tfdist.liveness.beat import Beat, Lines, to_line
from tfdist.liveness.judge import Limits, Verdict
from tfdist.liveness.monitor import BEAT_S
from tfdist.liveness.stops import Stops

_CONNECT_S = 10.0
_LEAVE_S = 1.0
LAST_WORK_S = 120.0
"""How long a process that is to be ended may write what must not be lost."""
_ABANDON_S = 1.0
_AT_ONCE_S = 2.0
_VERDICT_S = 1.0
_STACK_S = 2.0


class Work(Protocol):
    """What must not be lost where a process is ended."""

    @property
    def busy(self) -> bool:
        """Whether it is being done."""

    def wait(self, timeout_s: "float | None" = None) -> None:
        """Returns when it is done, or after a time."""

    def abandon(self, timeout_s: float) -> None:
        """Gives it up, leaving nothing half done; returns then, or after a time."""


class Pulse:
    """What this process is doing, told to the monitor at every heartbeat by a thread of its own.

    Without a monitor (a job of one worker) nothing is told, and all methods work.

    Attributes:
        stops: Where the job may be stopped.
        saves: Whether this process would save before it stops.
        has_monitor: Whether anybody listens.

    Args:
        index: Which worker this is.
        monitor: Where the monitor is, as its `address`; None for no monitor.
        hang_timeout: What the user asked for; None takes the monitor's.
        launched: Whether the monitor is the launcher's.

    Raises:
        PeerError: nothing answers at the monitor's address.
    """

    def __init__(
        self,
        index: int = 0,
        monitor: "str | None" = None,
        hang_timeout: "float | None" = None,
        *,
        launched: bool = False,
    ) -> None:
        if hang_timeout is not None:
            Limits(hang_timeout)
        self.stops = Stops()
        self.saves = False
        self.has_monitor = monitor is not None
        self._index = index
        self._launched = launched
        self._lock = threading.Lock()
        self._phase, self._step, self._slowest_s = "outside", 0, 0.0
        self._moved_at = time.monotonic()
        self._stage: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._last_seen: Any = None
        self._work: list[Work] = []
        self._ended = threading.Event()
        self._judged = threading.Event()
        self._verdict: Verdict | None = None
        self._ending = False
        if monitor is not None:
            self._connect(monitor, hang_timeout)

    def stage_from(self, read: "Callable[[], tuple[int, int]]") -> None:
        """Sets where the progress within a step is read: a count that grows, and the stage."""
        self._stage = read

    def finish_before_exit(self, work: Work) -> None:
        """Lets `work` come to its end before this process is ended; it gets `LAST_WORK_S` seconds."""
        self._work.append(work)

    def finish_work(self) -> None:
        """Returns when all work of `finish_before_exit` is done."""
        for work in self._work:
            work.wait()

    def abandon_work(self) -> None:
        """Gives up the work of `finish_before_exit`, for a process that is to end at once."""
        deadline = time.monotonic() + _ABANDON_S
        for work in self._work:
            work.abandon(max(0.0, deadline - time.monotonic()))

    def moved(self) -> None:
        """Tells that something has come forward."""
        self._moved_at = time.monotonic()

    def stepped(self, step: int, seconds: float) -> None:
        """Tells that a call of the compiled loop has come back, at `step`, and how long one of its steps took."""
        if self._phase == "step":  # and not a trace
            self._slowest_s = max(self._slowest_s, seconds)
        self._step = step
        self.enter("callback")

    def resumed(self, step: int) -> None:
        """Tells at which step training goes on."""
        self._step = step

    def enter(self, phase: str) -> str:
        """Sets what this process is doing now, one of `PHASES`; returns what it was."""
        before, self._phase = self._phase, phase
        self._moved_at = time.monotonic()
        if self.has_monitor and before != phase and ("outside" in (before, phase) or before == "start"):
            # At once: whether a process that ends now was in training must be known, and where it began.
            self._send(self.beat().to_message())
        return before

    def failed(self, why: str, *, by_others: bool, for_good: bool = False) -> None:
        """Tells what has ended this process's training.

        Args:
            why: the error.
            by_others: whether it is one that comes from the loss of another worker.
            for_good: whether the job would fail in the same way if it were started again.
        """
        if self.has_monitor:
            self._send({"type": "failed", "why": why, "by_others": by_others, "for_good": for_good})

    def request_stop(self, why: str) -> None:
        """Wishes that the job stops at a step that all workers can reach, and be started again later."""
        if self.has_monitor:
            self._send({"type": "stop", "why": why})
        else:
            begun, done = self.stops.counts
            self._stop(begun, at_once=done == 0)

    @property
    def doing(self) -> str:
        """What this process is doing now, one of `PHASES`."""
        return self._phase

    def what_happened(self) -> "str | None":
        """Returns why the job cannot go on, as the monitor says; waits a moment for it."""
        self._judged.wait(_VERDICT_S)
        return None if self._verdict is None else self._verdict.text

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Sets what this process is doing within."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def forget_stop(self) -> None:
        """Lets a process of its own train again, after it was stopped."""
        if not self.has_monitor:
            self.stops = Stops()

    def beat(self) -> Beat:
        """Returns the heartbeat of this moment."""
        count, stage = self._stage()
        now = time.monotonic()
        if (count, stage) != self._last_seen:
            self._last_seen, self._moved_at = (count, stage), now
        begun, done = self.stops.counts
        writes = self._phase == "save" or any(work.busy for work in self._work)
        still_s, slowest_s = now - self._moved_at, self._slowest_s
        return Beat(self._phase, self._step, stage, still_s, slowest_s, begun, done, self.saves, writes)

    def close(self) -> None:
        """Says goodbye: this process goes on without the others, or ends well."""
        if self.has_monitor and not self._ended.is_set():
            self._ended.set()
            self._send({"type": "bye"})
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(2 * BEAT_S)

    def _connect(self, monitor: str, hang_timeout: "float | None") -> None:
        address, _, token = monitor.rpartition("/")
        try:
            self._socket = connect(address, _CONNECT_S)
        except OSError as error:
            raise PeerError(
                f"worker {self._index}: nothing answers at {address}, where the job's workers hear of each other "
                f"({error.strerror or error}); check that the network lets the workers connect"
            ) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._far = not address.startswith(("127.", "localhost"))
        self._where = address
        hello = {"index": self._index, "token": token, "pid": os.getpid(), "host": socket.gethostname()}
        self._send({"type": "hello", "hang_timeout": hang_timeout, **hello})
        self._heard_at = time.monotonic()
        self._limits = Limits(hang_timeout or Limits().hang_timeout)
        self._thread = threading.Thread(target=self._run, name="tfdist-pulse", daemon=True)
        self._thread.start()

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(to_line(message))

    def _run(self) -> None:
        lines = Lines()
        beat_at = 0.0
        while not self._ended.is_set():
            now = time.monotonic()
            if beat_at and (late_s := now - beat_at) > self._limits.pause:
                # Nothing could move while this process was stopped, and nobody be heard.
                self._moved_at = min(now, self._moved_at + late_s)
                self._heard_at = now
            if now >= beat_at:
                self._send(self.beat().to_message())
                beat_at = now + BEAT_S
            self._socket.settimeout(max(0.01, beat_at - now))
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                data = None
            except OSError:
                data = b""
            if self._ended.is_set():
                return
            if data == b"":
                self._lost_monitor("ended without a word")
                return
            if data is not None:
                self._heard_at = time.monotonic()
                for message in lines.feed(data):
                    self._take(message)
            elif self._far and time.monotonic() - self._heard_at > self._limits.hang_timeout:
                # This process may itself have been stopped for so long: what has come meanwhile is read first.
                self._lost_monitor(f"has said nothing for {time.monotonic() - self._heard_at:.0f} s")
                return

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "welcome":
            self._limits = Limits(message["hang_timeout"])
        elif kind == "verdict":
            self._obey(Verdict.from_message(message))
        elif kind == "hold":
            self._send(self.stops.hold())
        elif kind == "stop":
            say(f"stopping: {message['why']}")
            self._stop(message["after"], at_once=message["at_once"])
        elif kind == "end":
            self._ended.set()

    def _stop(self, after: int, *, at_once: bool) -> None:
        self.stops.stop_after(0 if at_once else after)
        if at_once:
            threading.Thread(target=self._leave_at_once, daemon=True).start()

    def _leave_at_once(self) -> None:
        """Ends this process where training has not come to its first step, which may take minutes."""
        time.sleep(_AT_ONCE_S)
        if self._phase != "outside" and self.stops.counts[1] == 0:
            say("no step was done since the last checkpoint, so there is nothing to save")
            exit_now(EXIT_REQUEUE)

    def _lost_monitor(self, how: str) -> None:
        if self._phase == "outside":
            return
        self._obey(
            Verdict(
                "lost",
                (),
                f"the monitor of this job at {self._where} {how}: worker 0, or the launcher, has ended or cannot be "
                f"reached from worker {self._index}",
            )
        )

    def _obey(self, verdict: Verdict) -> None:
        """Begins to end this process, once: a job that has lost a worker cannot go on."""
        self._verdict = self._verdict or verdict
        self._judged.set()
        if self._phase != "outside" and not self._ending:
            self._ending = True
            threading.Thread(target=self._end, args=(verdict,), name="tfdist-end", daemon=True).start()

    def _end(self, verdict: Verdict) -> None:
        say(verdict.text)
        if self._index in verdict.workers:
            if verdict.kind == "silent" and self._launched:
                time.sleep(_STACK_S)  # the launcher's signal is under way: it prints the stacks, and ends this process
            else:
                say("this process is at:")
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        deadline = time.monotonic() + LAST_WORK_S
        for work in self._work:
            work.wait(max(0.0, deadline - time.monotonic()))
        self.abandon_work()
        if verdict.kind == "lost":
            # The collective of the main thread fails by itself, and what the script does then is its own affair.
            threading.main_thread().join(_LEAVE_S)
        exit_now(EXIT_FAILED)


def say(text: str) -> None:
    """Prints a line of tfdist's own to standard error, where there is one: what is to be done is done all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(f"tfdist: {text}", file=sys.stderr, flush=True)


def exit_now(code: int) -> None:
    """Ends this process at once, whatever its threads are blocked in."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
