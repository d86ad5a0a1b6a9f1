"""What telemetry is asked to do."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfdist.config import require_steps
from tfdist.errors import UsageError


@dataclasses.dataclass(frozen=True)
class TelemetryOptions:
    """What telemetry is asked to do; see `ScalingCallback` for the attributes."""

    log_dir: str
    every: int | None = None
    trace_steps: tuple[int, int] | None = None
    profile: bool = False
    hparams: Mapping[str, Any] | None = None
    baseline_examples_per_second: float | None = None
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if not self.log_dir or (os.path.exists(self.log_dir) and not os.path.isdir(self.log_dir)):
            raise UsageError(f"log_dir={self.log_dir!r}: a folder is needed, new or existing")
        whole = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if self.every is not None and not whole:
            raise UsageError(f"every={self.every!r}: an integer of at least 1 is needed, or None")
        if self.trace_steps is not None:
            require_steps("trace_steps", self.trace_steps)
        if self.profile and self.trace_steps is None:
            raise UsageError("profile=True needs a range of steps: give trace_steps, e.g. trace_steps=(100, 110)")
        for name in ("baseline_examples_per_second", "peak_tflops"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise UsageError(f"{name}={value!r}: a number above 0 is needed, or None")
