"""How the workers of a job stop at the same step, without an exchange at every step.

All workers of a job begin the same calls of compiled loops, one after the other, and count them. To stop, each is asked
to begin no more until told (it is held); the answer tells how many it has begun. The largest of these numbers is the
call after which all stop: those behind still make up for it, as the others wait for them in it.
"""

import threading
from typing import Any

from tfdist.errors import EXIT_REQUEUE


class Preempted(SystemExit):
    """The job was asked to stop; what it had is saved. As an exit code it is `EXIT_REQUEUE`."""

    def __init__(self) -> None:
        super().__init__(EXIT_REQUEUE)


class Stops:
    """Counts this process's calls of compiled loops, and ends them where all workers have agreed to."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._done = 0
        self._held = False
        self._after: int | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Calls begun, and calls that have come back."""
        return self._begun, self._done

    def begin(self) -> None:
        """Is called before each call of a compiled loop.

        Raises:
            Preempted: if the job stops here.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._after is not None)
            if self._after is not None and self._begun >= self._after:
                raise Preempted
            self._begun += 1

    def end(self) -> None:
        """Is called after each call that `begin` has let pass."""
        self._done = self._begun

    def hold(self) -> dict[str, Any]:
        """Lets no further call begin until `stop_after`; returns what to answer."""
        with self._changed:
            self._held = True
            return {"type": "held", "begun": self._begun, "done": self._done}

    def stop_after(self, call: int) -> None:
        """Ends the training after the call of that number."""
        with self._changed:
            self._after = call
            self._changed.notify_all()
