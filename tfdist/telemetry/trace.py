"""A Chrome trace of some steps: one row for each worker; open it at https://ui.perfetto.dev."""

import json
import os

import numpy as np

from tfdist.files import write_whole
from tfdist.telemetry.anatomy import StepParts

COLUMNS = 5
"""Numbers that say when one step did what (see `moments`)."""


def moments(times: StepParts) -> np.ndarray:
    """Returns for each step: begin, input there, gradients there, gradients summed, end; in shape (steps, COLUMNS)."""
    there = times.begins + times.input
    gradients = there + times.ready.mean(axis=1)
    return np.stack([times.begins, there, gradients, gradients + times.communication, times.ends], axis=1)


def write_trace(path: "str | os.PathLike[str]", first_step: int, workers: np.ndarray) -> None:
    """Writes the trace of all workers.

    Workers' clocks differ. An all-reduce ends for all of them at nearly the same time, so clocks are put right by the
    median difference of those moments from the first worker's.

    Args:
        path: the file.
        first_step: number of the first step.
        workers: `moments` of each worker, in shape (workers, steps, COLUMNS).
    """
    skew = np.median(workers[:, :, 3] - workers[:1, :, 3], axis=1)
    aligned = workers - skew[:, None, None]
    start = aligned.min()
    events: list[dict] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "steps"}}]
    names = ("input", "compute", "communication", "update")
    for worker, steps in enumerate(aligned):
        events.append(_named("thread_name", worker, f"worker {worker}"))
        for i, step in enumerate(steps):
            events.append(_event(f"step {first_step + i}", worker, step[0] - start, step[-1] - start))
            for name, begin, end in zip(names, step, step[1:], strict=False):
                events.append(_event(name, worker, begin - start, end - start))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    write_whole(path, text)


def _named(what: str, worker: int, name: str) -> dict:
    return {"name": what, "ph": "M", "pid": 0, "tid": worker, "args": {"name": name}}


def _event(name: str, worker: int, begin: float, end: float) -> dict:
    micros = {"ts": round(1e6 * begin, 1), "dur": round(1e6 * max(end - begin, 0.0), 1)}
    return {"name": name, "cat": "step", "ph": "X", "pid": 0, "tid": worker, **micros}
