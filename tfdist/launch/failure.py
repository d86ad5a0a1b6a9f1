"""What is told of a failure of a job, to people and to programs."""

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist.errors import EXIT_REQUEUE
from tfdist.launch.output import Screen


@dataclass(frozen=True)
class Failure:
    """Why one attempt of a job ended.

    Attributes:
        worker: Which worker failed first.
        host: Where it ran.
        code: Its exit code, minus the signal's number if a signal ended it.
        why: What the workers' heartbeats say, if they say anything.
        last_lines: What it printed last.
        others: For each other worker, how it ended.
        step: The last step that any worker has told of; None where training had not begun.
        after_s: Seconds from the beginning of the attempt until it was seen.
        at: When it was seen, in seconds since 1970.
        for_good: Whether it would come again if the job were started again.
    """

    worker: int
    host: str
    code: int
    why: "str | None"
    last_lines: tuple[str, ...]
    others: dict[int, str]
    step: "int | None"
    after_s: float
    at: float
    for_good: bool = False

    @property
    def headline(self) -> str:
        """One line for people."""
        at = "" if self.step is None else f", after step {self.step}"
        why = f": {self.why}" if self.why else ""
        return f"worker {self.worker} failed first, {how(self.code)}, on {self.host}{at}{why}"

    def as_event(self) -> dict[str, object]:
        """Returns what is written of it."""
        return {"event": "failure", **asdict(self)}


class EventLog:
    """A file of JSON lines, one for each event.

    Args:
        file: The file; None for none.
        screen: Is told, once, where the file cannot be written: that must not end the job.
    """

    def __init__(self, file: "Path | None", screen: Screen) -> None:
        self._file = file
        self._screen = screen

    def append(self, event: Mapping[str, object]) -> None:
        """Adds an event."""
        if self._file is None:
            return
        try:
            with open(self._file, "a", encoding="utf8") as stream:
                stream.write(json.dumps(event) + "\n")
        except OSError as error:
            self._screen.note(f"tfdist launch: no more events in {self._file}: {error.strerror or error}".encode())
            self._file = None


def how(code: int) -> str:
    """Says how a process with this exit code has ended."""
    if code >= 0:
        meaning = " (asked to stop, all saved)" if code == EXIT_REQUEUE else ""
        return f"with exit code {code}{meaning}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"  # a real-time signal
    return f"ended by {name}" + (" (is the memory full?)" if name == "SIGKILL" else "")
