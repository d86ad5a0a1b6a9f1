"""Catches the signals that ask the launcher to stop, for the time it runs."""

import signal
import threading
from types import FrameType

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_UNLESS_IGNORED = (signal.SIGHUP,)  # nohup ignores it, and means it


class CaughtSignals:
    """A context in which SIGINT, SIGTERM and SIGHUP are noted down instead of ending the process.

    Outside the main thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self) -> None:
        """Notes nothing yet."""
        self._caught: list[int] = []
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "CaughtSignals":
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            ignored = [number for number in _UNLESS_IGNORED if signal.getsignal(number) == signal.SIG_IGN]
            for number in _ALWAYS + _UNLESS_IGNORED:
                if number not in ignored:
                    self._previous[number] = signal.signal(number, self._note)
            if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
                # So a shell without job control starts `tfdist launch ... &`. A worker would inherit it, and not print
                # its stacks when it hangs; what has a handler here is back at its default in a new process.
                self._previous[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, lambda number, frame: None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restores the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def take(self) -> list[int]:
        """Returns the signals caught since the last call, oldest first."""
        caught = self._caught[:]
        del self._caught[: len(caught)]
        return caught

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)
