"""Writes in the background, one thing after the other, at a low priority and at a pace that leaves the cores free."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.cores import available_cores

_NICENESS = 19
_SHARE = 0.02
"""Of the time of all cores, what the thread may take while nobody waits for it."""
_FIRST_S = 0.01
"""Of work that is rested for before any is done: the step that has begun copies what it changes, and is to be alone."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Failure:
    """What could not be written, and why."""

    what: str
    why: str


class Writer:
    """A thread for each piece of work, and never two at a time.

    Attributes:
        error: the last failure that nobody has taken yet.
    """

    def __init__(self) -> None:
        self.error: Failure | None = None
        self._thread: threading.Thread | None = None
        self._starts = threading.Lock()
        self._awaited = threading.Event()
        self._abandoned = False
        self._began = self._rests_until = float("-inf")

    def write(self, work: Callable[[Callable[[], None]], None], what: str) -> None:
        """Begins to do `work`, when what came before is done.

        Args:
            work: raises OSError where it fails. It is given a function to call between its pieces, which rests, and
                raises OSError where the work is to be given up.
            what: its name, for `error`.
        """
        self.wait()
        self._awaited.clear()
        # Done in good time before the next one, if that comes as soon as this one has.
        before, self._began = self._began, time.monotonic()
        self._rests_until = self._began + (self._began - before) / 2
        # No daemon: a process that ends by itself finishes its work first.
        thread = threading.Thread(target=self._run, args=(work, what), name="tfdist-save", daemon=False)
        with self._starts:
            self._thread = thread
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wait(self, timeout_s: "float | None" = None) -> None:
        """Returns when nothing is left to do, or after `timeout_s` seconds."""
        with self._starts:
            thread = self._thread
        if thread is not None:
            self._awaited.set()
            thread.join(timeout_s)

    def abandon(self, timeout_s: float) -> None:
        """Lets the work fail where it rests next, so that it removes what it has begun; waits for that."""
        self._abandoned = True
        self.wait(timeout_s)

    def _run(self, work: Callable[[Callable[[], None]], None], what: str) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            rest = self._resting()
            rest()
            work(rest)
        except Exception as error:  # noqa: BLE001 - whatever it is, training must not learn of it by a lost thread
            self.error = Failure(what, getattr(error, "strerror", None) or str(error) or type(error).__name__)

    def _resting(self) -> Callable[[], None]:
        """Returns a function that rests for as long as the work since its last call has to be made up for."""
        rest_per_work = max(0.0, 1 / (_SHARE * available_cores()) - 1)
        rested_at = time.thread_time() - _FIRST_S

        def rest() -> None:
            nonlocal rested_at
            until = min(self._rests_until, time.monotonic() + rest_per_work * (time.thread_time() - rested_at))
            # A process that ends waits for this thread, by Python itself.
            while (left_s := until - time.monotonic()) > 0 and threading.main_thread().is_alive():
                if self._awaited.wait(min(left_s, _LOOK_S)):
                    break
            if self._abandoned:
                raise OSError("it was given up, as the process is to end at once")
            rested_at = time.thread_time()

        return rest
