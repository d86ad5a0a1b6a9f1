"""How a model is trained, and what is known about its batches."""

import dataclasses

from tfdist.errors import UsageError
from tfdist.hooks import Hook
from tfdist.transport import Transport


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a model is to be trained.

    Attributes:
        hook: aggregates the gradients.
        transport: moves them; a name, or a transport (see `tfdist.transport.make_transport`).
        accumulate_steps: micro-batches that a replica batch is cut into, with one aggregation for all.
        clip_global_norm: largest norm of the aggregated gradients, or None.
        jit_compile: compile forward and backward pass (the part between collectives) with XLA.
    """

    hook: Hook
    transport: "str | Transport" = "auto"
    accumulate_steps: int = 1
    clip_global_norm: "float | None" = None
    jit_compile: bool = False

    def __post_init__(self):
        if isinstance(self.accumulate_steps, bool) or not isinstance(self.accumulate_steps, int):
            raise UsageError(f"accumulate_steps={self.accumulate_steps!r}: an integer of at least 1 is needed")
        if self.accumulate_steps < 1:
            raise UsageError(f"accumulate_steps={self.accumulate_steps}: an integer of at least 1 is needed")
        if self.clip_global_norm is not None and not self.clip_global_norm > 0:
            raise UsageError(f"clip_global_norm={self.clip_global_norm!r}: a norm above 0 is needed, or None")


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """What is known about the batches while the step is traced (see `tfdist.data.Feed`).

    Attributes:
        full_batches: every replica has the same number of examples in every batch.
        presharded: each worker knows its own part of the global batch only.
    """

    full_batches: bool = False
    presharded: bool = False
