"""Sizes made by hand."""

import pytest

from tfdist.scaling.sizes import Size
from tfdist.telemetry.record import RunRecord, WorkerTimes


def record(workers, *, replicas=None, batch=64, link=None, **options):
    times = tuple(WorkerTimes(*parts, ready_ms=(parts[1],), peak_memory_mb=500.0) for parts in workers)
    step = times[0].step_ms
    return RunRecord(
        **{
            "finished": True,
            "model": {"name": "model", "parameters": 10, "shapes_sha256": "x"},
            "strategy": "CollectiveAllReduceStrategy",
            "num_workers": len(times),
            "num_replicas": replicas or len(times),
            "global_batch_size": batch,
            "hook": "allreduce",
            "transport": "collective",
            "bytes_per_step": 1_000_000,
            "link": link,
            "steps": 100,
            "step_ms": {"mean": step, "median": step, "p95": step, "p99": step},
            "workers": times,
            "lost_seconds": {"startup": 1.0, "evaluation": 0.0, "save": 0.0},
            "flops_per_example": None,
            "mfu": None,
            "provenance": {"host": "<here> & there", "versions": {"tfdist": "0.1.0"}, "devices": ["CPU"]},
            **options,
        }
    )


@pytest.fixture
def make_record():
    """Makes a record from (input, compute, communication, overhead) in ms of each worker."""
    return record


@pytest.fixture
def make_size():
    """Makes a size from the same, with step times of repetitions around it."""

    def make(workers, *, mode="strong", spread=0.0, ceiling=None, **options):
        made = record(workers, **options)
        step = made.step_ms["mean"]
        return Size(
            mode=mode,
            replicas=made.num_replicas,
            global_batch_size=made.global_batch_size,
            step_ms=step,
            all_step_ms=(step * (1 - spread), step, step * (1 + spread)),
            ceiling_ms=() if ceiling is None else (ceiling,),
            workers=made.workers,
            runs=(made,),
        )

    return make
