"""Who is lost or stuck: a judgement on what the workers' heartbeats say, without clocks or connections."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tfdist.errors import UsageError
from tfdist.liveness.beat import COMPUTING, READING, Beat

_MORE_FOR_OTHER_WORK = 20
_STEPS = 5
_SUSPICIOUS_S = 2.5


@dataclass(frozen=True)
class Limits:
    """How long a worker may show no sign of life.

    Attributes:
        hang_timeout: Seconds for a worker that is silent, and for a step; but a step may always take five times
            the longest one so far. What happens outside of steps (tracing, evaluation, saving, callbacks) may take
            twenty times as long.
    """

    hang_timeout: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.hang_timeout, bool) or not isinstance(self.hang_timeout, int | float):
            raise UsageError(f"hang_timeout={self.hang_timeout!r}: a number of seconds of at least 1 is needed")
        if not (1 <= self.hang_timeout and math.isfinite(self.hang_timeout)):
            raise UsageError(f"hang_timeout={self.hang_timeout:g}: a number of seconds of at least 1 is needed")

    @property
    def pause(self) -> float:
        """By how many seconds a thread that sends heartbeats must be late to have been stopped with its process."""
        return max(0.5, self.hang_timeout / 4)

    def still(self, beat: Beat) -> float:
        """Returns for how many seconds nothing may move in what the worker is doing."""
        if beat.waits or beat.phase in ("step", "data"):
            return max(self.hang_timeout, _STEPS * beat.slowest_s)
        return _MORE_FOR_OTHER_WORK * self.hang_timeout


@dataclass(frozen=True)
class Seen:
    """What is known of one worker.

    Attributes:
        index: Which.
        name: Its address, or its host and process, for messages.
        beat: Its last heartbeat; None before the first.
        silent_s: For how long it has said nothing.
        connected: Whether its connection stands.
        left: Whether it has said goodbye.
        failed: What has ended its training, if something has.
        for_good: Whether that would come again if the job were started again.
    """

    index: int
    name: str
    beat: "Beat | None" = None
    silent_s: float = 0.0
    connected: bool = True
    left: bool = False
    failed: "str | None" = None
    for_good: bool = False

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"worker {self.index} ({self.name})"

    @property
    def matters(self) -> bool:
        """Whether others depend on it now."""
        return self.beat is not None and self.beat.in_training and not self.left


@dataclass(frozen=True)
class Verdict:
    """Why a job cannot go on.

    Attributes:
        kind: Its connection broke; it says nothing; it lives but does not move.
        workers: The indices of those to blame.
        text: The whole, for people.
    """

    kind: Literal["lost", "silent", "stuck"]
    workers: tuple[int, ...]
    text: str

    def to_message(self) -> dict[str, Any]:
        """Returns what travels."""
        return {"type": "verdict", "kind": self.kind, "workers": list(self.workers), "text": self.text}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Verdict":
        """Reads what came."""
        return cls(message["kind"], tuple(message["workers"]), str(message["text"]))


def judge(seen: Sequence[Seen], limits: Limits) -> "Verdict | None":
    """Says who keeps the job from going on, or None while all is well.

    A worker that waits for the others in a collective is never to blame, unless all of them wait there. While one
    does something that may take long (it traces, evaluates, saves), those that wait for it are patient.
    """
    lost = [worker for worker in seen if not worker.connected and (worker.matters or worker.failed)]
    if lost and any(worker.matters for worker in seen):
        return _verdict("lost", lost, seen, "; ".join(_has_ended(worker) for worker in lost))
    silent = [worker for worker in seen if worker.matters and worker.silent_s > limits.hang_timeout]
    if silent:
        return _verdict("silent", silent, seen, "; ".join(_says_nothing(worker) for worker in silent))
    return _stuck([worker for worker in seen if worker.matters], seen, limits)


def suspect(seen: Sequence[Seen]) -> "Verdict | None":
    """Says who is to blame where a collective has failed already: one that misses heartbeats, before its time is up."""
    silent = [worker for worker in seen if worker.matters and (worker.silent_s > _SUSPICIOUS_S or not worker.connected)]
    if not silent:
        return None
    return _verdict("silent", silent, seen, "; ".join(_says_nothing(worker) for worker in silent))


def _stuck(workers: Sequence[Seen], seen: Sequence[Seen], limits: Limits) -> "Verdict | None":
    busy = [worker for worker in workers if not worker.beat.waits]
    late = [worker for worker in busy if worker.beat.still_s > limits.still(worker.beat)]
    if busy and not late:
        return None
    if late:
        # One that computes may wait for a number from one that still reads its data.
        behind = min(_place(worker) for worker in late)
        late = [worker for worker in late if _place(worker) == behind]
        does = [_does_not_move(worker, limits) for worker in late]
        return _verdict("stuck", late, seen, "; ".join(does))
    waited = min((worker.beat.still_s - limits.still(worker.beat) for worker in workers), default=0.0)
    if not workers or waited <= 0:
        return None
    away = [w for w in seen if not w.matters and not w.left and w.beat is not None]
    if away:
        # Its script does something else. That may take long, as all that happens outside of steps.
        if waited <= (_MORE_FOR_OTHER_WORK - 1) * limits.hang_timeout:
            return None
        return _verdict("stuck", away, seen, "; ".join(f"{w.label} is outside of training" for w in away))
    behind = min(worker.beat.step for worker in workers)
    blamed = [worker for worker in workers if worker.beat.step == behind]
    if len(blamed) < len(workers):
        return _verdict("stuck", blamed, seen, "; ".join(_does_not_move(worker, limits) for worker in blamed))
    return _verdict(
        "stuck",
        blamed,
        seen,
        f"all workers wait for each other, {blamed[0].beat.doing()}, and nothing has moved for "
        f"{min(worker.beat.still_s for worker in workers):.0f} s: the network between them, or the collective itself, "
        "is stuck",
    )


def _place(worker: Seen) -> tuple[int, int]:
    """Returns how far a worker has come."""
    if worker.beat.phase == "data":
        return worker.beat.step, READING
    return worker.beat.step, worker.beat.stage if worker.beat.phase == "step" else COMPUTING


def _has_ended(worker: Seen) -> str:
    if worker.failed:
        return f"{worker.label} has failed: {worker.failed}"
    return f"{worker.label} has ended without a word, {worker.beat.doing()}"


def _says_nothing(worker: Seen) -> str:
    return (
        f"{worker.label} has said nothing for {worker.silent_s:.0f} s, last heard {worker.beat.doing()}: it is "
        "stopped, or cut off from the network"
    )


def _does_not_move(worker: Seen, limits: Limits) -> str:
    return (
        f"{worker.label} is stuck {worker.beat.doing()}: nothing has moved for {worker.beat.still_s:.0f} s "
        f"(at most {limits.still(worker.beat):.0f} s are allowed; --hang_timeout={limits.hang_timeout:g})"
    )


def _verdict(kind: str, blamed: Sequence[Seen], seen: Sequence[Seen], text: str) -> Verdict:
    indices = tuple(worker.index for worker in blamed)
    waiting = [worker for worker in seen if worker.matters and worker.index not in indices and worker.beat.waits]
    if waiting:
        them = ", ".join(f"worker {worker.index} {worker.beat.doing()}" for worker in waiting[:8])
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        text = f"{text}. Waiting for it: {them}{more}"
    return Verdict(kind, indices, text)
