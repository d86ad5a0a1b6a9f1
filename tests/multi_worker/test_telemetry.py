"""Telemetry on workers: one record and one trace for the job, who is behind and by how much, and nothing changed."""

import json
import time

import keras
import numpy as np
import pytest

import tfdist
from tests.multi_worker.harness import on_workers
from tests.multi_worker.models import dense, regression
from tfdist.telemetry.record import read_record


class Pause(keras.callbacks.Callback):
    same_on_all = True

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


class Alone(Pause):
    same_on_all = False  # so that the workers agree after each step whether to stop


def prepared(job):
    with job.scope():
        model = dense(2)
        model.compile("sgd", "mse")
    return job.prepare(model)


@on_workers(2, 3)
def test_a_straggler_is_named_with_its_lag(job):
    """Worker 1 pauses for 15 ms after each step."""
    x, y = regression(40)
    model = prepared(job)
    if job.stock:
        model.fit(x, y, batch_size=4, epochs=9, verbose=0, shuffle=False)
        return {"weights": model.get_weights()}
    telemetry = tfdist.ScalingCallback(job.folder / "log", every=30, trace_steps=(11, 16))
    pause = Pause(0.015 if job.index == 1 else 0.0)
    model.fit(x, y, batch_size=4, epochs=9, verbose=0, shuffle=False, callbacks=[telemetry, pause])
    if job.chief:
        record = read_record(job.folder / "log")
        assert record.finished and record.num_workers == job.num_workers == len(record.workers)
        assert record.slowest == 1 and record.lag_ms == pytest.approx(15, rel=0.2), record.workers
        difference = record.workers[1].overhead_ms - record.workers[0].overhead_ms
        assert difference == pytest.approx(15, rel=0.2)
        assert record.workers[0].communication_ms > 10
        steps = [worker.step_ms for worker in record.workers]
        np.testing.assert_allclose(steps, steps[0], rtol=0.03)
        assert record.link["bytes_per_second"] > 0
        trace = json.loads((job.folder / "log" / "trace.json").read_text())["traceEvents"]
        rows = {event["tid"] for event in trace if event["ph"] == "X"}
        assert rows == set(range(job.num_workers))
        # Clocks are put right by the ends of the all-reduces, which are nearly the same for all.
        ends = [[e["ts"] + e["dur"] for e in trace if e["name"] == "communication" and e["tid"] == t] for t in rows]
        assert np.abs(np.array(ends) - ends[0]).max() < 15_000
    return {"weights": model.get_weights()}


@on_workers(2, stock=False)
def test_agreements_are_communication(job):
    """A callback that may stop alone makes workers agree after each step: the others wait there for worker 1."""
    x, y = regression(40)
    model = prepared(job)
    callbacks = [tfdist.ScalingCallback(job.folder / "log"), Alone(0.015 if job.index == 1 else 0.0)]
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    if job.chief:
        record = read_record(job.folder / "log")
        assert record.slowest == 1 and record.lag_ms == pytest.approx(15, rel=0.2), record.workers
        # Half of the pause tells whose overhead it is; what callbacks cost besides depends on the machine.
        assert record.workers[1].overhead_ms - record.workers[0].overhead_ms > 7.5, record.workers
    return {}
