"""Watches running workers: passes on their output, ends all when one fails, finds out which failed first."""

import re
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from tfdist.errors import EXIT_REQUEUE
from tfdist.launch.output import Screen
from tfdist.launch.process import WorkerProcess
from tfdist.launch.signals import CaughtSignals
from tfdist.liveness import Monitor, Verdict
from tfdist.liveness.judge import Seen

TERMINATE_GRACE_S = 5.0
"""How long the other workers may take to end after one has failed, before they are killed."""
INTERRUPT_GRACE_S = 30.0
"""How long the workers may take to end after SIGINT, SIGTERM or SIGHUP."""
SAVE_GRACE_S = 600.0
"""How much longer a worker may take that writes a checkpoint, or has agreed to do so."""
_SETTLE_S = 1.0
_SILENT_S = 2.5
_LEAVE_S = 2.0
_TICK_S = 0.05
_LAST_WORDS_S = 0.5

_CONSEQUENCE = re.compile(
    rb"UnavailableError|AbortedError|CancelledError|DeadlineExceededError|PeerError"
    rb"|Connection reset by peer|Socket closed"
)
"""What a worker says that failed because another one went away."""


class Supervisor:
    """Runs the workers of one attempt to their end.

    Args:
        workers: The workers, started.
        screen: Where messages go.
        caught: The signals sent to this process.
        monitor: Hears the workers' heartbeats.
        on_training: Is called once, with the step at which training began.
        on_tick: Is called again and again.

    Attributes:
        first_failed: The worker that is to blame, where the attempt failed.
        why: What the heartbeats say about that.
        interrupted_by: The signal to this process that ended the attempt.
        failed_at: When the first failure was seen, by the monotonic clock.
        asked_to_stop: Whether workers ended because they were asked to, with everything saved.
        killed: The workers that were killed here.
        failed_to_stop: Whether the failure came when the attempt was asked to stop: not everything is saved.
        for_good: Whether the failure would come again at the next attempt.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        screen: Screen,
        caught: CaughtSignals,
        monitor: Monitor,
        on_training: Callable[[int], None],
        on_tick: Callable[[Monitor], None],
    ) -> None:
        """Starts with all workers running."""
        self._workers = list(workers)
        self._running = list(workers)
        self._screen = screen
        self._caught = caught
        self._monitor = monitor
        self._on_training: Callable[[int], None] | None = on_training
        self._on_tick = on_tick
        self._failed: list[WorkerProcess] = []
        self.failed_at = 0.0
        self._stopping = False
        self._terminate_at = self._kill_at = self._kill_all_at = float("inf")
        self.interrupted_by: int | None = None
        self.first_failed: WorkerProcess | None = None
        self.why: str | None = None
        self.asked_to_stop = False
        self.failed_to_stop = False
        self.killed: set[int] = set()
        self.for_good = False
        self._agreed = self._forced = False
        self._waited_at: dict[int, float] = {}

    def run(self) -> None:
        """Returns when all workers have ended; then the attributes say how."""
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
                self._stop_if_hung()
                self._stop_if_failed()
                self._tell_of_training()
                self._on_tick(self._monitor)
                self._end_those_left()
                self._screen.flush()
                if self._screen.broken and not self._stopping:  # as a pipeline ends whose last part has ended
                    self.interrupted_by = signal.SIGPIPE
                    self._stop(signal.SIGTERM, TERMINATE_GRACE_S, but=set())

    def _collect_ended(self) -> None:
        for worker in list(self._running):
            code = worker.poll()
            if code is None:
                continue
            self._running.remove(worker)
            worker.drain()
            # SIGTERM asks to stop also where Python has not come to its handler.
            untrained = code == -signal.SIGTERM and not self._stopping and worker.index not in self._trained()
            if (code == EXIT_REQUEUE or untrained) and not self._failed:
                if not self.asked_to_stop and not self._stopping:
                    # The others have agreed to stop too; those that are not in training do not know of it.
                    self._terminate_at = time.monotonic() + TERMINATE_GRACE_S
                    self._give(INTERRUPT_GRACE_S)
                self.asked_to_stop = not self._forced
            elif self._fails(worker, code):
                self.failed_at = self.failed_at or time.monotonic()
                self._failed.append(worker)

    def _fails(self, worker: WorkerProcess, code: int) -> bool:
        """Whether this end of a worker is a failure of the attempt."""
        if code == 0 or self.first_failed is not None or self._forced:
            return False
        if not self._stopping and not self.asked_to_stop:
            return True
        if not self._stops_in_order:
            return False  # a program may answer a signal with any exit code
        seen = self._monitor.seen()[worker.index]
        loses = seen.failed is not None or (code < 0 and seen.matters and seen.beat.done > 0)
        self.failed_to_stop |= loses
        return loses

    @property
    def _stops_in_order(self) -> bool:
        """Whether the workers that train stop at a step that all have agreed on, and save."""
        return (self._agreed or self.asked_to_stop) and self.first_failed is None and not self._forced

    def _stop_if_failed(self) -> None:
        """After a failure, finds the worker that failed on its own, and ends the others.

        When a worker crashes, the others' collectives fail a moment later, and as a Python process takes a
        while to end, one of them can be gone before it. So one that died of a lost connection counts as the
        first to fail only if no other follows within a second, and none misses heartbeats.
        """
        if self.first_failed is not None or not self._failed:
            return
        own_fault = [
            worker for worker in self._failed if worker.lost or not _CONSEQUENCE.search(b"\n".join(worker.tail))
        ]
        if own_fault:
            self._blame(own_fault[0])
        elif verdict := self._monitor.suspect():
            self._obey(verdict)
        elif not self._running or time.monotonic() >= self.failed_at + _SETTLE_S:
            self._blame(self._failed[0])

    def _stop_if_hung(self) -> None:
        if self._monitor.verdict is None or self.first_failed is not None:
            return
        if self._stops_in_order or not self._stopping:
            self.failed_to_stop |= self._stops_in_order
            self._obey(self._monitor.verdict)

    def _obey(self, verdict: Verdict) -> None:
        blamed = [worker for worker in self._workers if worker.index in verdict.workers]
        self.why = verdict.text
        if verdict.kind == "silent":
            for worker in blamed:
                worker.dump_stack()
        self._blame((blamed or self._failed or self._workers)[0])

    def _blame(self, worker: WorkerProcess) -> None:
        self._name(worker)
        label = self._monitor.seen()[worker.index].label
        self._monitor.condemn(Verdict("lost", (worker.index,), f"{label} has failed"))
        self._stop(signal.SIGTERM, TERMINATE_GRACE_S, but=self._in_training() | self._leaving())

    def _name(self, worker: WorkerProcess) -> None:
        self.first_failed = worker
        self.failed_at = self.failed_at or time.monotonic()
        seen = self._last_seen(worker)
        self.why = self.why or seen.failed
        self.for_good = seen.for_good

    def _last_seen(self, worker: WorkerProcess) -> Seen:
        """Returns what the monitor knows of a worker; of one that has ended, when it has read all that it has sent."""
        limit = time.monotonic() + _LAST_WORDS_S
        while True:
            seen = self._monitor.seen()[worker.index]
            if worker.poll() is None or not seen.connected or time.monotonic() >= limit:
                return seen
            time.sleep(_TICK_S / 10)

    def _tell_of_training(self) -> None:
        if self._on_training is not None and (steps := self._monitor.steps()) is not None:
            self._on_training(steps[0])
            self._on_training = None

    def _pass_on(self, number: int) -> None:
        name = signal.Signals(number).name.encode()
        if self._stopping:
            self._screen.note(b"tfdist launch: %s: killing the workers" % name)
            self._kill_at = self._kill_all_at = 0.0
            self.interrupted_by = self.interrupted_by or number
            self._forced, self.asked_to_stop = True, False
            return
        self._screen.note(b"tfdist launch: passing %s on to the workers; a second one kills them" % name)
        self._collect_ended()  # what has ended by now has not ended by what is passed on
        if not (self._running or self._failed):
            return
        self.interrupted_by = number
        if self._failed:
            self._name(self._failed[0])
        # Who has sent it may have sent it to the workers too, and they take a second one as a wish to end at once.
        self._agreed = number == signal.SIGTERM and self._monitor.ask_to_stop("the launcher got SIGTERM")
        self._stop(number, INTERRUPT_GRACE_S, but=self._in_training() if self._agreed else set())

    def _stop(self, number: int, grace_s: float, *, but: set[int]) -> None:
        """Ends the workers.

        Args:
            number: The signal for them.
            grace_s: After these seconds they are killed.
            but: Those that know of it already, and end by themselves.
        """
        self._stopping = True
        self._give(grace_s)
        self._send(number, but=but)

    def _give(self, grace_s: float) -> None:
        self._kill_at = time.monotonic() + grace_s
        self._kill_all_at = self._kill_at + SAVE_GRACE_S

    def _end_those_left(self) -> None:
        now = time.monotonic()
        if now >= self._terminate_at:
            self._terminate_at = float("inf")
            told = self._monitor.ask_to_stop("another worker has stopped")
            self._send(signal.SIGTERM, but=self._in_training() if told else set())
        if now >= self._kill_at:
            for index in self._worth_waiting_for() if now < self._kill_all_at else ():
                self._waited_at[index] = now
            waiting = {index for index, at in self._waited_at.items() if now < min(at + _LEAVE_S, self._kill_all_at)}
            if now < self._kill_at + INTERRUPT_GRACE_S and not self._forced:
                waiting |= self._leaving()
            self.killed.update(worker.index for worker in self._running if worker.index not in waiting)
            self._send(signal.SIGKILL, but=waiting)

    def _send(self, number: int, *, but: set[int]) -> None:
        for worker in self._running:
            if worker.index not in but:
                worker.signal(number)

    def _trained(self) -> set[int]:
        """Returns the workers that have taken part in training."""
        return {seen.index for seen in self._monitor.seen() if seen.beat is not None and seen.beat.in_training}

    def _in_training(self) -> set[int]:
        return {seen.index for seen in self._monitor.seen() if seen.matters and seen.connected}

    def _leaving(self) -> set[int]:
        """Returns the worker that is to blame, where it ends by itself: its exit code says what its error was."""
        seen = None if self.first_failed is None else self._monitor.seen()[self.first_failed.index]
        return set() if seen is None or seen.failed is None else {seen.index}

    def _worth_waiting_for(self) -> set[int]:
        """Returns the workers that write a checkpoint, or come to the step after which they do so."""
        alive = [seen for seen in self._monitor.seen() if seen.connected and seen.silent_s < _SILENT_S]
        return {
            seen.index
            for seen in alive
            if seen.beat is not None and (seen.beat.writes or (self._stops_in_order and seen.matters))
        }
