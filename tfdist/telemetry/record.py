"""A run's record: the file that says what a run was and where its time went."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError
from tfdist.files import write_whole
from tfdist.telemetry.parts import PARTS

FILE_NAME = "tfdist-run.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class WorkerTimes:
    """What one worker's steps spent where, as means over all timed steps, in milliseconds.

    Attributes:
        input_ms: waiting for the batch.
        compute_ms: forward pass, backward pass, optimizer.
        communication_ms: exposed communication, and waiting for slower workers.
        overhead_ms: between the steps.
        ready_ms: from the input to the last gradient, of each replica of this worker.
        peak_memory_mb: most memory in use at one time.
    """

    input_ms: float
    compute_ms: float
    communication_ms: float
    overhead_ms: float
    ready_ms: tuple[float, ...]
    peak_memory_mb: float

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.busy_ms + self.communication_ms

    @property
    def busy_ms(self) -> float:
        """All but communication: what the others wait for where it is longest."""
        return self.input_ms + self.compute_ms + self.overhead_ms

    def part(self, name: str) -> float:
        """Returns one of PARTS in milliseconds."""
        return getattr(self, f"{name}_ms")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run was, and where its time went.

    Attributes:
        finished: whether training came to its end; else these are the figures when they were last written.
        model: {"name", "parameters", "shapes_sha256"}.
        strategy: class of the strategy.
        num_workers: processes.
        num_replicas: replicas over all workers.
        global_batch_size: examples of a step; None where it is not known.
        hook: name of the hook.
        transport: what moved the gradients.
        bytes_per_step: what one replica sends in a step; None where the hook does not tell.
        link: {"latency_s", "bytes_per_second"} of an all-reduce, measured before the first step; None for one replica.
        steps: timed steps; those of calls that traced are left out.
        step_ms: {"mean", "median", "p95", "p99"} on the chief.
        workers: one entry for each worker.
        lost_seconds: {"startup", "evaluation", "save", "restarts"}: what was spent on the chief on other than steps,
            and what the launcher took between failures and new starts.
        flops_per_example: of forward and backward pass; None where they cannot be counted.
        mfu: model FLOPs utilization, from 0 to 1; None where the peak of the devices is not known.
        provenance: versions, devices, host, command, commit, start.
    """

    finished: bool
    model: Mapping[str, Any]
    strategy: str
    num_workers: int
    num_replicas: int
    global_batch_size: int | None
    hook: str
    transport: str
    bytes_per_step: int | None
    link: Mapping[str, float] | None
    steps: int
    step_ms: Mapping[str, float]
    workers: tuple[WorkerTimes, ...]
    lost_seconds: Mapping[str, float]
    flops_per_example: float | None
    mfu: float | None
    provenance: Mapping[str, Any]

    @property
    def examples_per_second(self) -> float | None:
        """Over all replicas, while steps run."""
        return 1e3 * self.global_batch_size / self.step_ms["mean"] if self.global_batch_size else None

    @property
    def slowest(self) -> int:
        """See `slowest_of`."""
        return slowest_of(self.workers)

    @property
    def lag_ms(self) -> float:
        """See `lag_of`."""
        return lag_of(self.workers)

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps."""
        stepping = self.steps * self.step_ms["mean"] / 1e3
        total = stepping + sum(self.lost_seconds.values())
        return stepping / total if total else 0.0

    def anatomy(self) -> dict[str, float]:
        """See `anatomy_of`."""
        return anatomy_of(self.workers)

    def write(self, folder: "str | os.PathLike[str]") -> None:
        """Writes the record into `folder`; the file appears whole or not at all."""
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)
        write_whole(Path(folder) / FILE_NAME, text)


def slowest_of(workers: Sequence[WorkerTimes]) -> int:
    """Returns the worker that the others wait for."""
    return max(range(len(workers)), key=lambda i: workers[i].busy_ms)


def lag_of(workers: Sequence[WorkerTimes]) -> float:
    """Returns by how many ms the slowest worker is behind the mean of the others; 0 for one worker."""
    slowest = slowest_of(workers)
    others = [worker.busy_ms for i, worker in enumerate(workers) if i != slowest]
    return workers[slowest].busy_ms - sum(others) / len(others) if others else 0.0


def anatomy_of(workers: Sequence[WorkerTimes]) -> dict[str, float]:
    """Returns each of PARTS in milliseconds as the job sees it: those of the slowest worker.

    The others' communication holds their waiting for it; its own is the least that all have.
    """
    slowest = workers[slowest_of(workers)]
    return {part: slowest.part(part) for part in PARTS}


def read_record(folder: "str | os.PathLike[str]") -> RunRecord:
    """Returns the record of the run in `folder`.

    Raises:
        UsageError: there is none, or it cannot be read; the message names the folder and says what is there.
    """
    path = Path(folder) / FILE_NAME
    if not Path(folder).is_dir():
        raise UsageError(f"{str(folder)!r}: there is no such folder; give the log_dir of a run")
    if not path.is_file():
        events = sorted(Path(folder).glob("**/*tfevents*"))
        found = f"its event file {events[0].name!r} was not written by it" if events else "no event file either"
        raise UsageError(
            f"{str(folder)!r}: no run of tfdist ({FILE_NAME} is missing, {found}); give the folder that "
            "tfdist.ScalingCallback or --log_dir of scripts/train.py wrote to"
        )
    try:
        values = json.loads(path.read_text(encoding="utf8"))
        if values.pop("format") != _FORMAT:
            raise ValueError("another format")
        workers = tuple(WorkerTimes(**{**w, "ready_ms": tuple(w["ready_ms"])}) for w in values.pop("workers"))
        record = RunRecord(workers=workers, **values)
        figures = [record.step_ms["mean"], *(w.step_ms for w in workers)]
        if not workers or record.steps < 1 or not all(math.isfinite(f) and f > 0 for f in figures):
            raise ValueError("no timed steps")
    except (ValueError, TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{str(path)!r} is no record of a run ({type(error).__name__}: {error}); it is damaged or was written by "
            "another version of tfdist; run the training again"
        ) from None
    return record


def require_readable_events(folder: "str | os.PathLike[str]") -> None:
    """Checks the event files that lie in `folder` itself.

    Raises:
        UsageError: naming one that is no event file, or that ends within a record.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    for path in sorted(Path(folder).glob("*tfevents*")):
        try:
            size = sum(16 + len(event) for event in RawEventFileLoader(str(path)).Load())
        except Exception as error:  # TensorBoard's readers raise several kinds
            raise UsageError(f"{str(path)!r} is no event file ({error}); remove it, or run again") from None
        if size != path.stat().st_size:
            raise UsageError(
                f"{str(path)!r} is damaged: {path.stat().st_size - size} bytes at its end are no whole record (the "
                "run was killed while it wrote, or is not the writer); remove the file, or run again"
            )
