"""Whether a place where workers run is well: a command of the user's says so."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfdist.launch.worker import signal_group

_LONGEST_S = 60.0


@dataclass
class HealthCheck:
    """Runs a shell command for a place, and reads its exit code: 0 says that the place is well.

    The command runs on this machine. It finds the place's number in TFDIST_PLACE, and its host's name in TFDIST_HOST.

    Attributes:
        command: The command; None for one that always says so.
        hosts: The host of each place, as the remote shell has it; None where all are on this machine.
    """

    command: "str | None" = None
    hosts: "Sequence[str] | None" = None
    _running: "dict[int, tuple[subprocess.Popen, float]]" = field(default_factory=dict)

    def look(self, place: int) -> "bool | None":
        """Begins to run the command, or looks how far it has come.

        Returns:
            Whether the place is well; None while the command runs, which may take a minute.
        """
        if self.command is None:
            return True
        if place not in self._running:
            self._running[place] = self._start(place), time.monotonic()
        process, began = self._running[place]
        code = process.poll()
        if code is None and time.monotonic() - began < _LONGEST_S:
            return None
        _end(process)
        del self._running[place]
        return code == 0

    def close(self) -> None:
        """Ends what still runs, and what it has started."""
        for process, _ in self._running.values():
            _end(process)
        self._running.clear()

    def _start(self, place: int) -> subprocess.Popen:
        host = socket.gethostname() if self.hosts is None else self.hosts[place]
        return subprocess.Popen(
            self.command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TFDIST_PLACE": str(place), "TFDIST_HOST": host},
        )


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
