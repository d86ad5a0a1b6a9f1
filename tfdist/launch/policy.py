"""Whether a job that has failed is started again, and when."""

import math
from dataclasses import dataclass, field

from tfdist.errors import UsageError

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_FIRST_OUT_S = 60.0
_UNWELL_S = 5.0


@dataclass(frozen=True)
class RestartPolicy:
    """How often a job may be started again.

    Attributes:
        max_restarts: Restarts without progress between them, within `window_s`. A restart after which training went
            beyond where it was before does not count.
        window_s: Restarts that are longer ago do not count.
    """

    max_restarts: int = 0
    window_s: float = 3600.0

    def __post_init__(self) -> None:
        if not isinstance(self.max_restarts, int) or isinstance(self.max_restarts, bool) or self.max_restarts < 0:
            raise UsageError(f"max_restarts={self.max_restarts!r} (--max_restarts): an integer from 0 is needed")
        window = self.window_s
        if not isinstance(window, int | float) or isinstance(window, bool) or not 0 < window < math.inf:
            raise UsageError(f"restart_window={window!r} (--restart_window): a number of seconds above 0 is needed")


@dataclass
class RestartBudget:
    """What is left of a policy; a clock is given to it, so that it needs none.

    Attributes:
        policy: The policy.
        total: Restarts so far.
    """

    policy: RestartPolicy
    total: int = 0
    _spent: list[float] = field(default_factory=list)
    _furthest: int = -1

    def progressed(self, step: "int | None") -> bool:
        """Is told of the step that training reached before it failed (None: none); returns whether it got further."""
        further = step is not None and step > self._furthest
        if further:
            self._furthest = step
            self._spent.clear()
        return further

    @property
    def spent(self) -> int:
        """Restarts that count now."""
        return len(self._spent)

    def wait_s(self, now: float) -> "float | None":
        """Takes a restart; returns how many seconds to wait before it, or None where none is left.

        After progress there is no wait; then each restart waits twice as long as the one before.
        """
        self._spent = [at for at in self._spent if now - at < self.policy.window_s]
        if len(self._spent) >= self.policy.max_restarts:
            return None
        before = len(self._spent)
        self._spent.append(now)
        self.total += 1
        return 0.0 if before == 0 else min(_FIRST_WAIT_S * 2 ** (before - 1), _LONGEST_WAIT_S)


@dataclass
class Places:
    """Where the workers of a job run, and which of these places are left out because they fail.

    A place that has failed twice in a row, with no step gained between, is left out for a while: a minute, then twice
    as long each time it fails again; one that is found not to be well is looked at again after some seconds. There are
    never fewer places than `least`. A clock is given to it.

    Attributes:
        count: Places in all; they are numbered from 0.
        least: How many workers the job needs.
    """

    count: int
    least: int
    _failures: dict[int, int] = field(default_factory=dict)
    _out_until: dict[int, float] = field(default_factory=dict)
    _times_out: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = self.least
        if not isinstance(least, int) or isinstance(least, bool) or not 1 <= least <= self.count:
            raise UsageError(f"min_workers={least!r} (--min_workers): an integer from 1 to {self.count} is needed")

    @property
    def active(self) -> list[int]:
        """The places that take part, in order; their order is that of the workers' indices."""
        return [place for place in range(self.count) if place not in self._out_until]

    def failed(self, place: int, now: float, *, progress: bool) -> bool:
        """Is told which place's worker failed; returns whether it is left out from now on.

        Args:
            place: Its number.
            now: The time, in seconds.
            progress: Whether training went further than ever before since the last failure.
        """
        if progress:
            self._failures.clear()
        self._failures[place] = self._failures.get(place, 0) + 1
        if self._failures[place] < 2 or not self._leave_out(place, now):
            return False
        times = self._times_out[place] = self._times_out.get(place, 0) + 1
        self._out_until[place] = now + _FIRST_OUT_S * 2 ** (times - 1)
        return True

    def unwell(self, place: int, now: float) -> bool:
        """Is told that a place is not well; returns whether it is left out, as there are others enough."""
        return self._leave_out(place, now)

    def due(self, now: float) -> list[int]:
        """Returns the places whose time out is over, and that may be tried again."""
        return [place for place, until in sorted(self._out_until.items()) if now >= until]

    def back(self, place: int) -> None:
        """Lets a place take part again."""
        del self._out_until[place]

    def _leave_out(self, place: int, now: float) -> bool:
        if place not in self._out_until and len(self.active) <= self.least:
            return False
        self._out_until[place] = now + _UNWELL_S
        self._failures.pop(place, None)
        return True
