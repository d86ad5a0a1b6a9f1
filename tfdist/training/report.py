"""Where a training loop tells how long its steps took."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The steps of one call into the compiled loop.

    Attributes:
        step: number of the last step, counted from 1 over the whole training.
        num_steps: steps in this call.
        seconds: wall time of the call. TensorFlow may still be at work when it returns, so sum over many.
        examples: examples of the global batches in this call, where the batch size is known.
    """

    step: int
    num_steps: int
    seconds: float
    examples: "int | None"


StepListener = Callable[[StepReport], None]
