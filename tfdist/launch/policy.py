"""Whether a job that has failed is started again, and when."""

import math
from dataclasses import dataclass, field

from tfdist.errors import UsageError

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


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

    def progressed(self, step: "int | None") -> None:
        """Is told of the step that training reached before it failed; None where it reached none."""
        if step is not None and step > self._furthest:
            self._furthest = step
            self._spent.clear()

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
