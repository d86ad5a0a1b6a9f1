"""Where a training loop tells what it does, and how long that took."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The steps of one call into the compiled loop.

    Attributes:
        step: number of the last step, counted from 1 over the whole training.
        num_steps: steps in this call.
        seconds: wall time of the call. TensorFlow may still be at work when it returns, so sum over many.
        examples: examples of the global batches in this call, where the batch size is known.
        began: when it began to wait for its input, or to start TensorFlow, in seconds since 1970.
        ended: when the call came back.
        input_there: when its input was there, where that was fetched outside of the call; else None.
        begins: see `TrainResult`.
        intervals: see `TrainResult`.
        traced: whether this call has traced and compiled a function.
    """

    step: int
    num_steps: int
    seconds: float
    examples: "int | None"
    began: float = 0.0
    ended: float = 0.0
    input_there: "float | None" = None
    begins: Any = None
    intervals: Any = None
    traced: bool = False


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a training did between its steps.

    Attributes:
        kind: what; an agreement is that of the workers on whether to stop.
        seconds: how long it took.
    """

    kind: Literal["agreement", "evaluation", "save"]
    seconds: float


StepListener = Callable[[StepReport], None]

Watcher = Callable[["StepReport | Activity"], None]
"""Called on every worker, after each call into the compiled loop and after each activity."""
