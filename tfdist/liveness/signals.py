"""Signals that ask a job to stop, seen at once: also while the main thread is blocked in a collective."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from types import FrameType

from tfdist.errors import EXIT_REQUEUE
from tfdist.liveness.pulse import Pulse, exit_now, say


def stop_signals(environ: "Mapping[str, str] | None" = None) -> list[signal.Signals]:
    """Returns the signals that ask to stop: SIGTERM, and under Slurm, whose users like it, SIGUSR1."""
    environ = os.environ if environ is None else environ
    return [signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in environ else [])]


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Leaves the program's handlers as they are.

    TensorFlow's coordination of workers takes SIGTERM to itself when it starts, unseen by Python: the first one would
    then do nothing at all (`tests/launch/test_survival.py::test_preempted_workers[1-trace]`).
    """
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                handler = signal.getsignal(number)
                if handler is not None:  # None: it was not set from Python
                    signal.signal(number, handler)


def exit_for_requeue(number: int, frame: "FrameType | None") -> None:
    """Handles a signal outside of training, where there is nothing to save: the job is to be started again."""
    text = f"tfdist: {signal.Signals(number).name} outside of training: nothing to save\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())  # the stream may be in the middle of a line of the code that was interrupted
    raise SystemExit(EXIT_REQUEUE)


def no_requeue() -> None:
    """Takes `exit_for_requeue` back: a process that trains without checkpoints would begin anew each time."""
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            if signal.getsignal(number) is exit_for_requeue:
                signal.signal(number, signal.SIG_DFL)


class StopSignals:
    """A context in which the first signal asks the job to stop at a step, and the second ends this process.

    Python runs handlers in the main thread, between two of its instructions, so a collective would keep them waiting.
    A thread of its own reads the signals' numbers instead. Outside of the main thread, which alone may set handlers,
    and where the program has handlers of its own, nothing is done.

    Args:
        pulse: is told of the wish to stop.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._asked = False
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> "StopSignals":
        """Begins to listen."""
        if threading.current_thread() is not threading.main_thread():
            return self
        ours = (signal.SIG_DFL, exit_for_requeue)
        wanted = [number for number in stop_signals() if signal.getsignal(number) in ours]
        if not wanted:
            return self
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._thread = threading.Thread(target=self._listen, args=(set(wanted),), name="tfdist-signals", daemon=True)
        self._thread.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._near.fileno(), warn_on_full_buffer=False)
        for number in wanted:
            self._previous[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Puts everything back."""
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_wakeup)
        self._near.close()
        self._thread.join()
        self._far.close()

    def _listen(self, wanted: "set[int]") -> None:
        while numbers := self._far.recv(64):
            for number in numbers:
                if self._previous_wakeup >= 0:
                    os.write(self._previous_wakeup, bytes([number]))
                if number not in wanted:
                    continue
                name = signal.Signals(number).name
                if self._asked:
                    say(f"a second signal ({name}): ending at once")
                    self._pulse.abandon_work()
                    self._pulse.close()
                    exit_now(EXIT_REQUEUE)
                say(f"{name}: the job will stop at a step, and save; a second signal ends this process at once")
                self._asked = True
                self._pulse.request_stop(name)
