"""The figures of a run (`--summary_json`): what it was, how fast it was, and what came out."""

import collections
import dataclasses
import hashlib
import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import SaveError
from tfdist.files import write_whole

if TYPE_CHECKING:
    import keras

    from tfdist.training.report import StepReport

_KEPT_CALLS = 10_000


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a run; the fields of the JSON file.

    Attributes:
        strategy: Name of the strategy.
        num_workers: Processes.
        num_replicas: Replicas, over all workers.
        global_batch_size: Examples of a step.
        hook: Spec of the hook that aggregated the gradients.
        transport: What moved them.
        steps: Training steps that this run did.
        examples_per_second: Over all replicas; None where no step was timed.
        step_time_ms: {"median": ..., "p95": ...}; None where no step was timed.
        first_loss: Of the first epoch (fit) or the first call of the loop (custom).
        final_loss: Of the last one.
        final_metrics: Metrics by name at the end; those of the test data begin with "test_".
        weights_sha256: See `weights_sha256`.
        restarts: How often the launcher started the job again.
        peak_memory_mb: Most memory that this process used, in MB: of one GPU, or without GPUs of the host.
    """

    strategy: str
    num_workers: int
    num_replicas: int
    global_batch_size: int
    hook: str
    transport: str
    steps: int
    examples_per_second: float | None
    step_time_ms: Mapping[str, float] | None
    first_loss: float | None
    final_loss: float | None
    final_metrics: Mapping[str, float]
    weights_sha256: str
    restarts: int
    peak_memory_mb: float

    def write(self, path: "str | os.PathLike[str]") -> None:
        """Writes the figures as JSON; the file appears whole or not at all.

        Numbers that are not finite become null, as JSON has none.

        Args:
            path: The file; its folder is made where it is missing.

        Raises:
            SaveError: it cannot be written.
        """
        path = Path(path)
        text = json.dumps(_finite(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            raise SaveError(
                f"the figures of the run could not be written into {path}: {error.strerror or error}. They are:\n{text}"
            ) from error


class StepTimes:
    """A step listener (see `tfdist.prepare`) that remembers how long steps took.

    The first call is left out where there are others: it holds the compilation.
    Median and p95 are those of the last calls, 10,000 of them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._first: StepReport | None = None
        self._timed_steps = 0
        self._seconds = 0.0
        self._last: collections.deque[tuple[float, int]] = collections.deque(maxlen=_KEPT_CALLS)

    def __call__(self, report: "StepReport") -> None:
        """Takes the report of one call."""
        self.steps += report.num_steps
        if self._first is None:
            self._first = report
        elif report.num_steps:
            self._timed_steps += report.num_steps
            self._seconds += report.seconds
            self._last.append((report.seconds / report.num_steps, report.num_steps))

    def examples_per_second(self, global_batch_size: int) -> float | None:
        """Returns the throughput over all replicas, or None where no step was timed.

        Args:
            global_batch_size: Examples of a step. The smaller last batch of an epoch counts as a full one.
        """
        steps, seconds = self._timed_steps, self._seconds
        if not steps and self._first is not None:
            steps, seconds = self._first.num_steps, self._first.seconds
        return steps * global_batch_size / seconds if steps and seconds > 0 else None

    def step_time_ms(self) -> dict[str, float] | None:
        """Returns median and p95 of the time of a step, or None where no step was timed."""
        timed = list(self._last)
        if not timed and self._first is not None and self._first.num_steps:
            timed = [(self._first.seconds / self._first.num_steps, self._first.num_steps)]
        if not timed:
            return None
        seconds, steps = (np.array(column) for column in zip(*timed, strict=True))
        median, p95 = (_percentile(seconds, steps, percent) for percent in (50, 95))
        return {"median": 1e3 * median, "p95": 1e3 * p95}


def restarts() -> int:
    """Returns how often the launcher has started this job again."""
    return int(os.environ.get("TFDIST_RESTARTS", "0"))


def weights_sha256(model: "keras.Model") -> str:
    """Returns the SHA-256 of all weights: of path, dtype, shape and bytes of each, in the model's order.

    Equal for two models exactly where all weights are bit for bit the same. Trainable and other weights count,
    state of optimizers and metrics does not.

    Args:
        model: A built model.
    """
    digest = hashlib.sha256()
    for weight in model.weights:
        array = np.ascontiguousarray(weight.numpy())
        digest.update(f"{weight.path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def peak_memory_mb() -> float:
    """Returns the most memory that was in use at one time: on one GPU, or without GPUs by this process."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        return max(tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"] for i in range(len(gpus))) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB on Linux


def _percentile(values: np.ndarray, weights: np.ndarray, percent: float) -> float:
    """Returns the smallest value that `percent` of the weight does not exceed."""
    order = np.argsort(values)
    share = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(share, share[-1] * percent / 100)])


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
