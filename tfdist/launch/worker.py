"""One worker process on this machine: its start, its end."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tfdist.launch.output import Screen
from tfdist.launch.process import WorkerProcess, exit_code


class Worker(WorkerProcess):
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
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe, so that the two stay in order
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            bufsize=0,
        )
        super().__init__(index, socket.gethostname(), process, screen, log)

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number if a signal ended it; None while it runs."""
        if self._exit_code is None:
            self._exit_code = exit_code(self._process)
        return self._exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children.

        Args:
            number: The signal.
        """
        signal_group(self.pid, number)

    def dump_stack(self) -> None:
        """Makes a process that does not answer print where it is, if it is one of tfdist's, and ends it."""
        dump_stack(self.pid)

    def reap(self) -> None:
        """Waits for the process and gives its id back; to be called last, after a SIGKILL or its end."""
        self._process.wait()
        self._process.stdout.close()


def signal_group(group: int, number: int) -> None:
    """Sends a signal to all of a process group.

    Args:
        group: Its id.
        number: The signal.
    """
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # all have ended (macOS answers with the second)


def dump_stack(pid: int) -> None:
    """Ends a process, which may be stopped, with SIGQUIT, at which one of tfdist's prints where it is.

    Args:
        pid: Its id.
    """
    # The second waits until the first lets a stopped process go on, and is then the first thing it sees.
    for number in (signal.SIGQUIT, signal.SIGCONT):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
