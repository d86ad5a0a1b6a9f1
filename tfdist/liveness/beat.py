"""What a worker says of itself at each heartbeat, and how lines travel."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

PHASES = {
    "outside": "outside of training",
    "start": "preparing to train",
    "trace": "tracing and compiling a function",
    "step": "training",
    "first": "in the first step of an epoch",
    "data": "reading the data",
    "evaluation": "evaluating",
    "save": "saving a checkpoint",
    "callback": "in a callback, or between two steps",
    "agreement": "agreeing with the other workers",
}
"""What a worker may be doing, in words."""

STAGES = ("reading the data", "computing", "waiting in the all-reduce", "updating the weights")
"""How far a step has come, in the order of the numbers that the compiled step writes."""
READING, COMPUTING, WAITING, UPDATING = range(4)

_WITH_STAGES = ("step", "first", "trace", "callback")  # a trace ends with a first run of what was traced

MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Beat:
    """One heartbeat.

    Attributes:
        phase: One of PHASES.
        step: Training steps done.
        stage: How far the next step has come, a place in STAGES.
        still_s: For how long nothing has moved: no step, no stage, no phase.
        slowest_s: The longest that a step of this process took so far; 0 before the first.
        begun: Calls of the compiled loops begun so far (see `Stops`).
        done: Calls that have come back.
        saves: Whether it would save before it stops.
        writes: Whether it writes a checkpoint, perhaps while it trains.
    """

    phase: str = "outside"
    step: int = 0
    stage: int = 0
    still_s: float = 0.0
    slowest_s: float = 0.0
    begun: int = 0
    done: int = 0
    saves: bool = False
    writes: bool = False

    @property
    def waits(self) -> bool:
        """Whether the worker waits for the others, as far as it knows."""
        return self.phase == "agreement" or (self.phase in _WITH_STAGES and self.stage == WAITING)

    @property
    def in_training(self) -> bool:
        """Whether the others depend on it."""
        return self.phase != "outside"

    def doing(self) -> str:
        """Says what the worker is doing."""
        if self.phase == "step" or (self.waits and self.phase != "agreement"):
            return f"{STAGES[self.stage]} of step {self.step + 1}"
        return f"{PHASES[self.phase]} for step {self.step + 1}" if self.phase == "data" else PHASES[self.phase]

    def to_message(self) -> dict[str, Any]:
        """Returns what travels."""
        return {"type": "beat", **asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Beat | None":
        """Reads what came; None where it is no heartbeat."""
        whole = [message.get(name) for name in ("step", "stage", "begun", "done")]
        seconds = [message.get(name) for name in ("still_s", "slowest_s")]
        phase = message.get("phase")
        well_formed = (
            isinstance(phase, str)
            and phase in PHASES
            and all(is_count(n) for n in whole)
            and whole[1] < len(STAGES)
            and all(isinstance(s, int | float) and 0 <= s < math.inf for s in seconds)
        )
        if not well_formed:
            return None
        said = [message.get(name) is True for name in ("saves", "writes")]
        return cls(phase, whole[0], whole[1], *map(float, seconds), *whole[2:], *said)


def is_count(value: Any) -> bool:
    """Whether what came is a number of steps, calls or the like."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def to_line(message: dict[str, Any]) -> bytes:
    """Returns the line that carries a message."""
    return json.dumps(message).encode("ascii") + b"\n"


class Lines:
    """Cuts what a connection gives into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> "list[dict[str, Any]]":
        """Returns the messages that are complete.

        Raises:
            ValueError: If what came is no line of ours.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError("a line that is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError:
            raise ValueError("a message of too many levels") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("no message")
        return messages
