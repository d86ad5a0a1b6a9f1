"""Whether a place where workers run is well: a command of the user's says so."""

import os
import subprocess
from dataclasses import dataclass, field

_LONGEST_S = 60.0


@dataclass
class HealthCheck:
    """Runs a shell command for a place, and reads its exit code: 0 says that the place is well.

    The command finds the place's number in TFDIST_PLACE.

    Attributes:
        command: The command; None for one that always says so.
    """

    command: "str | None" = None
    _running: "dict[int, subprocess.Popen]" = field(default_factory=dict)

    def passes(self, place: int) -> bool:
        """Runs the command to its end."""
        if self.command is None:
            return True
        try:
            return self._start(place).wait(_LONGEST_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.close()

    def look(self, place: int) -> "bool | None":
        """Begins to run the command, or looks how far it has come: None while it runs."""
        if self.command is None:
            return True
        code = self._start(place).poll()
        if code is not None:
            del self._running[place]
        return None if code is None else code == 0

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self._running.clear()

    def _start(self, place: int) -> subprocess.Popen:
        if place not in self._running:
            self._running[place] = subprocess.Popen(
                self.command,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TFDIST_PLACE": str(place)},
            )
        return self._running[place]
