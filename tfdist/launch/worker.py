"""One worker process: its start, its output, its end."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tfdist.launch.output import LineAssembler, Screen

_READ_BYTES = 1 << 16
_DRAIN_S = 1.0


class Worker:
    """A worker process in a session and process group of its own.

    It is not reaped before `reap`: until then its id, which is also that of its group, belongs to nobody
    else, so that a signal to the group never reaches a stranger.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        env: Mapping[str, str],
        screen: Screen,
        log: BinaryIO | None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts the process.

        Args:
            index: Which worker it is.
            command: The program and its arguments.
            env: All its environment variables.
            screen: Where its lines are shown.
            log: Gets its output unchanged; unbuffered. None for no log.
            pass_fds: Descriptors that it inherits.
        """
        self.index = index
        self._screen = screen
        self._log = log
        self._lines = LineAssembler(lambda line: screen.line(index, line))
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe, so that the two stay in order
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            bufsize=0,
        )
        os.set_blocking(self.fileno(), False)
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    @property
    def tail(self) -> list[bytes]:
        """Its last lines."""
        return self._lines.tail

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

    def _take(self) -> int | None:
        """Passes on one buffer; returns its size, 0 at the end of output, None if nothing is there now."""
        try:
            data = os.read(self.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:  # a full disk must not end the training
                self._screen.note(b"tfdist launch: worker %d: no more log: %s" % (self.index, str(error).encode()))
                self._log = None
        self._lines.feed(data)
        return len(data)

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number if a signal ended it; None while it runs."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13; reaps the process
            return self._process.poll()
        if self._exit_code is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children.

        Args:
            number: The signal.
        """
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # all have ended (macOS answers with the second)

    def dump_stack(self) -> None:
        """Makes a process that does not answer print where it is, if it is one of tfdist's, and ends it."""
        # The second waits until the first lets a stopped process go on, and is then the first thing it sees.
        for number in (signal.SIGABRT, signal.SIGCONT):
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def reap(self) -> None:
        """Waits for the process and gives its id back; to be called last, after a SIGKILL or its end."""
        self._process.wait()
        self._process.stdout.close()
