"""Writes in the background, one thing after the other, at a low priority."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

_NICENESS = 10


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

    def write(self, work: Callable[[], None], what: str) -> None:
        """Begins to do `work`, when what came before is done.

        Args:
            work: raises OSError where it fails.
            what: its name, for `error`.
        """
        self.wait()
        # No daemon: a process that ends by itself finishes its work first.
        self._thread = threading.Thread(target=self._run, args=(work, what), name="tfdist-save", daemon=False)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wait(self, timeout_s: "float | None" = None) -> None:
        """Returns when nothing is left to do, or after `timeout_s` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self, work: Callable[[], None], what: str) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, training must not learn of it by a lost thread
            self.error = Failure(what, getattr(error, "strerror", None) or str(error) or type(error).__name__)
