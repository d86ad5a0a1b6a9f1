"""What all workers have in common, on this machine and on others: their output, and the end of a process."""

import os
import subprocess
import time
from abc import ABC, abstractmethod
from typing import BinaryIO

from tfdist.launch.output import LineAssembler, Screen

READ_BYTES = 1 << 16
_DRAIN_S = 1.0


def exit_code(process: subprocess.Popen, *, wait: bool = False) -> int | None:
    """Says how a process has ended, without giving its id back.

    Args:
        process: The process.
        wait: Wait for its end.

    Returns:
        Its exit code, minus the signal's number if a signal ended it; None while it runs.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13; gives the id back
        return process.wait() if wait else process.poll()
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class WorkerProcess(ABC):
    """A worker, as the launcher sees it.

    Attributes:
        index: Which worker it is.
        host: The name of its machine.
    """

    def __init__(self, index: int, host: str, process: subprocess.Popen, screen: Screen, log: BinaryIO | None) -> None:
        """Takes over a process that this one has started.

        Args:
            index: Which worker it is.
            host: The name of its machine.
            process: The process through which its output comes, in a process group of its own.
            screen: Where its lines are shown.
            log: Gets its output unchanged; unbuffered. None for no log.
        """
        self.index = index
        self.host = host
        self._process = process
        self._screen = screen
        self._log = log
        self._lines = LineAssembler(lambda line: screen.line(index, line))
        os.set_blocking(self.fileno(), False)
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """The id of the process on this machine, and of its group."""
        return self._process.pid

    @property
    def tail(self) -> list[bytes]:
        """Its last lines."""
        return self._lines.tail

    @property
    def lost(self) -> bool:
        """Whether it counts as ended because the way to its machine broke."""
        return False

    def fileno(self) -> int:
        """Returns the descriptor to read its output from."""
        return self._process.stdout.fileno()

    def read(self) -> bool:
        """Passes on the output that is there, at most one buffer.

        Returns:
            False when there will be no more.
        """
        taken = self._take()
        if taken:
            self._screen.progress(self.index, self._lines.unfinished)
        return taken != 0

    def drain(self) -> None:
        """Passes on the output that is there now, and ends its last line."""
        deadline = time.monotonic() + _DRAIN_S  # a process that left the group may go on writing
        while self._take() and time.monotonic() < deadline:
            pass
        self._lines.close()

    @abstractmethod
    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number if a signal ended it; None while it runs."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Sends a signal to the worker and its children.

        Args:
            number: The signal.
        """

    @abstractmethod
    def dump_stack(self) -> None:
        """Makes a worker that does not answer print where it is, if it is one of tfdist's, and ends it."""

    @abstractmethod
    def reap(self) -> None:
        """Waits for the process and gives its id back; to be called last, after a SIGKILL or its end."""

    def _take(self) -> int | None:
        """Passes on one buffer; returns its size, 0 at the end of output, None if nothing is there now."""
        try:
            data = os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self._pass_on(data)
        return len(data)

    def _pass_on(self, data: bytes) -> None:
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:  # a full disk must not end the training
                self._screen.note(b"tfdist launch: worker %d: no more log: %s" % (self.index, str(error).encode()))
                self._log = None
        self._lines.feed(data)
