"""What was measured at each size, over its repetitions."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tfdist.scaling.plan import Trial
from tfdist.telemetry.parts import PARTS
from tfdist.telemetry.record import RunRecord, WorkerTimes, anatomy_of, lag_of, slowest_of


@dataclasses.dataclass(frozen=True)
class Size:
    """One size in one mode.

    Attributes:
        mode: "strong" or "weak"; or "given" for runs that were not made by a sweep.
        replicas: how many.
        global_batch_size: examples of a step.
        step_ms: median over the repetitions.
        all_step_ms: of each repetition.
        ceiling_ms: of each repetition without communication; empty where there is none.
        workers: medians over the repetitions.
        runs: the records.
    """

    mode: str
    replicas: int
    global_batch_size: int | None
    step_ms: float
    all_step_ms: tuple[float, ...]
    ceiling_ms: tuple[float, ...]
    workers: tuple[WorkerTimes, ...]
    runs: tuple[RunRecord, ...]

    @property
    def examples_per_second(self) -> float:
        """Over all replicas. Without a known batch: steps per second."""
        return 1e3 * (self.global_batch_size or 1) / self.step_ms

    @property
    def slowest(self) -> int:
        """See `slowest_of`."""
        return slowest_of(self.workers)

    @property
    def lag_ms(self) -> float:
        """See `lag_of`."""
        return lag_of(self.workers)

    def anatomy(self) -> dict[str, float]:
        """See `anatomy_of`."""
        return anatomy_of(self.workers)

    @property
    def bytes_per_step(self) -> int | None:
        """What one replica sends."""
        return self.runs[0].bytes_per_step

    @property
    def link(self) -> Mapping[str, float] | None:
        """Latency and bytes per second of an all-reduce, medians over the repetitions."""
        links = [run.link for run in self.runs if run.link is not None]
        if not links:
            return None
        return {name: statistics.median(link[name] for link in links) for name in links[0]}

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that one replica sends in an all-reduce; None where the link was not measured."""
        link = self.link
        return None if link is None else 2 * (self.replicas - 1) / self.replicas * link["bytes_per_second"]


def sizes_of(records: Mapping[Trial, RunRecord]) -> list[Size]:
    """Returns the sizes of a sweep, strong ones first, ascending. The smallest size belongs to both modes."""
    if not records:
        return []
    smallest = min(trial.replicas for trial in records)
    modes = [mode for mode in ("strong", "weak") if any(t.mode == mode for t in records)]
    sizes = []
    for mode in modes:
        for replicas in sorted({trial.replicas for trial in records}):
            fits = [t for t in records if t.replicas == replicas and (t.mode == mode or replicas == smallest)]
            runs = [records[t] for t in fits if not t.ceiling]
            if runs:
                sizes.append(size_of(mode, runs, [records[t] for t in fits if t.ceiling]))
    return sizes


def size_of(mode: str, runs: Sequence[RunRecord], ceilings: Iterable[RunRecord] = ()) -> Size:
    """Returns the size of runs that are repetitions of one another."""
    return Size(
        mode=mode,
        replicas=runs[0].num_replicas,
        global_batch_size=runs[0].global_batch_size,
        step_ms=statistics.median(run.step_ms["mean"] for run in runs),
        all_step_ms=tuple(run.step_ms["mean"] for run in runs),
        ceiling_ms=tuple(run.step_ms["mean"] for run in ceilings),
        workers=tuple(_median(workers) for workers in zip(*(run.workers for run in runs), strict=True)),
        runs=tuple(runs),
    )


def _median(workers: Sequence[WorkerTimes]) -> WorkerTimes:
    def middle(name: str) -> float:
        return statistics.median(getattr(worker, name) for worker in workers)

    return WorkerTimes(
        **{f"{part}_ms": middle(f"{part}_ms") for part in PARTS},
        ready_ms=tuple(map(statistics.median, zip(*(worker.ready_ms for worker in workers), strict=True))),
        peak_memory_mb=middle("peak_memory_mb"),
    )
