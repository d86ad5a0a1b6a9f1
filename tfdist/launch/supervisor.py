"""Watches running workers: passes on their output, ends all when one fails, finds out which failed first."""

import re
import selectors
import signal
import time
from collections.abc import Sequence

from tfdist.launch.output import Screen
from tfdist.launch.signals import CaughtSignals
from tfdist.launch.worker import Worker

TERMINATE_GRACE_S = 5.0
"""How long the other workers may take to end after one has failed, before they are killed."""
INTERRUPT_GRACE_S = 30.0
"""How long the workers may take to end after SIGINT, SIGTERM or SIGHUP; enough for a last checkpoint."""
_SETTLE_S = 1.0
_TICK_S = 0.05

_CONSEQUENCE = re.compile(
    rb"UnavailableError|AbortedError|CancelledError|DeadlineExceededError|PeerError"
    rb"|Connection reset by peer|Socket closed"
)
"""What a worker says that failed because another one went away."""


class Supervisor:
    """Runs the workers of one job to their end.

    Args:
        workers: The workers, started.
        screen: Where messages go.
        caught: The signals sent to this process.
    """

    def __init__(self, workers: Sequence[Worker], screen: Screen, caught: CaughtSignals) -> None:
        """Starts with all workers running."""
        self._running = list(workers)
        self._screen = screen
        self._caught = caught
        self._failed: list[Worker] = []
        self._failed_at = 0.0
        self._stopping = False
        self._kill_at = float("inf")
        self.interrupted_by: int | None = None
        self.first_failed: Worker | None = None

    def run(self) -> None:
        """Returns when all workers have ended; then `first_failed` and `interrupted_by` say how."""
        with selectors.DefaultSelector() as selector:
            for worker in self._running:
                selector.register(worker, selectors.EVENT_READ, worker)
            while self._running:
                for number in self._caught.take():
                    self._pass_on(number)
                for key, _ in selector.select(_TICK_S):
                    if not key.data.read():
                        selector.unregister(key.data)
                self._collect_ended()
                self._stop_if_failed()
                if time.monotonic() >= self._kill_at:
                    self._signal_all(signal.SIGKILL)
                self._screen.flush()
                if self._screen.broken and not self._stopping:  # as a pipeline ends whose last part has ended
                    self.interrupted_by = signal.SIGPIPE
                    self._stop(signal.SIGTERM, TERMINATE_GRACE_S)

    def _collect_ended(self) -> None:
        for worker in list(self._running):
            code = worker.poll()
            if code is None:
                continue
            self._running.remove(worker)
            worker.drain()
            if code != 0 and not self._stopping:
                self._failed_at = self._failed_at or time.monotonic()
                self._failed.append(worker)

    def _stop_if_failed(self) -> None:
        """After a failure, finds the worker that failed on its own, and ends the others.

        When a worker crashes, the others' collectives fail a moment later, and as a Python process takes a
        while to end, one of them can be gone before it. So one that died of a lost connection counts as the
        first to fail only if no other follows within a second.
        """
        if self._stopping or not self._failed:
            return
        own_fault = [worker for worker in self._failed if not _CONSEQUENCE.search(b"\n".join(worker.tail))]
        if own_fault or not self._running or time.monotonic() >= self._failed_at + _SETTLE_S:
            self.first_failed = (own_fault or self._failed)[0]
            self._stop(signal.SIGTERM, TERMINATE_GRACE_S)

    def _pass_on(self, number: int) -> None:
        name = signal.Signals(number).name.encode()
        if self._stopping:
            self._screen.note(b"tfdist launch: %s: killing the workers" % name)
            self._kill_at = 0.0
            return
        self._screen.note(b"tfdist launch: passing %s on to the workers; a second one kills them" % name)
        self.interrupted_by = number
        if self._failed:
            self.first_failed = self._failed[0]
        self._stop(number, INTERRUPT_GRACE_S)

    def _stop(self, number: int, grace_s: float) -> None:
        self._stopping = True
        self._kill_at = time.monotonic() + grace_s
        self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for worker in self._running:
            worker.signal(number)
