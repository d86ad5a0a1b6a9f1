"""Collects what a training tells of its steps, gathers it from all workers now and then, and has it written."""

import collections
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.summary import peak_memory_mb
from tfdist.telemetry.anatomy import StepParts, dissect
from tfdist.telemetry.flops import flops_per_example, peak_tflops
from tfdist.telemetry.options import TelemetryOptions
from tfdist.telemetry.provenance import provenance
from tfdist.telemetry.record import FILE_NAME, RunRecord, WorkerTimes
from tfdist.telemetry.trace import COLUMNS, moments, write_trace
from tfdist.telemetry.writer import ScalingWriter, worker_scalars
from tfdist.training.report import Activity, StepReport
from tfdist.training.runner import Runner
from tfdist.training.workers import gathered_numbers
from tfdist.transport import Link, measure

_FIRST_AFTER = 20  # timed steps
_EVERY_S = 10.0
_KEPT_STEPS = 10_000
_SUMS = 5  # steps, and the seconds of each part


class Telemetry:
    """Watches one training (see `Runner.watch`). Every worker makes one, at the same time.

    Args:
        options: what is asked for.
        runner: of the training.
    """

    def __init__(self, options: TelemetryOptions, runner: Runner):
        self._options = options
        self._runner = runner
        self._hook = runner.options.hook
        self._replicas = runner.strategy.num_replicas_in_sync
        self._link = self._measured_link()
        self._pending: list[tuple[StepReport, float | None, float, float]] = []
        self._untimed: StepReport | None = None
        self._previous_end: float | None = None
        self._away = self._agreeing = 0.0
        lost_before = float(os.environ.get("TFDIST_LOST_SECONDS", "0"))
        self._lost = {"startup": 0.0, "evaluation": 0.0, "save": 0.0, "restarts": lost_before}
        self._sums: np.ndarray | None = None
        self._peaks: np.ndarray | None = None
        self._recent: collections.deque[float] = collections.deque(maxlen=_KEPT_STEPS)
        self._global_batch: int | None = None
        self._every = options.every
        self._due = runner.steps_done + (options.every or _FIRST_AFTER)
        self._step = runner.steps_done
        self._trace: list[np.ndarray] | None = [] if options.trace_steps else None
        self._first_traced = 0
        self._profiling = False
        self._provenance = provenance()
        self._model = _described(runner.model)
        self._flops = flops_per_example(runner.model)
        self._tokens = _tokens_per_example(runner.model)
        self._writer: ScalingWriter | None = None
        self._has_hparams = False
        if runner.chief:
            os.makedirs(options.log_dir, exist_ok=True)
            _keep_earlier(Path(options.log_dir))
            self._writer = ScalingWriter(options.log_dir)
        self._profile_if_due(self._step)

    def __call__(self, event: "StepReport | Activity") -> None:
        """Takes what the training tells."""
        if isinstance(event, Activity) and event.kind == "agreement":
            self._agreeing += event.seconds
            return
        if isinstance(event, Activity):
            self._lost[event.kind] += event.seconds
            self._away += event.seconds
            return
        if event.examples is not None:
            self._global_batch = event.examples // event.num_steps
        if event.traced:
            self._lost["startup"] += event.ended - event.began
            self._untimed = event
        else:
            self._pending.append((event, self._previous_end, self._away, self._agreeing))
        self._previous_end, self._away, self._agreeing, self._step = event.ended, 0.0, 0.0, event.step
        if self._trace is not None:
            self._follow_trace(event)
        if event.step >= self._due and self._pending:
            self._flush()
            self._due = event.step + (self._every or _FIRST_AFTER)

    def finish(self) -> None:
        """Writes what is left, and ends the record."""
        if self._sums is None and not self._pending and self._untimed is not None:
            self._pending.append((self._untimed, None, 0.0, 0.0))  # all that there is
        if self._trace:
            self._write_trace()
        if self._profiling:
            tf.profiler.experimental.stop()
        if self._pending:
            self._flush()
        if self._runner.chief and self._sums is not None:
            self._record(finished=True).write(self._options.log_dir)
        if self._writer is not None:
            self._writer.close()
        self._runner.unwatch(self)

    def _measured_link(self) -> "Link | None":
        if self._replicas == 1 or self._hook.name == "noop":
            return None
        return measure(self._runner.strategy, self._hook.transport)

    def _flush(self) -> None:
        times = StepParts.joined([dissect(*pending) for pending in self._pending])
        self._pending.clear()
        own = [len(times.total), *(getattr(times, part).sum() for part in ("input", "compute", "communication"))]
        rows = self._gathered([*own, times.overhead.sum(), peak_memory_mb(), *times.ready.sum(axis=0)])
        peaks, sums = rows[:, _SUMS], np.delete(rows, _SUMS, axis=1)
        self._sums = sums if self._sums is None else self._sums + sums
        self._peaks = peaks if self._peaks is None else np.maximum(peaks, self._peaks)
        self._recent.extend(times.total)
        if self._every is None:
            # From figures that all workers have, so that they meet at the same step.
            step_s = rows[:, 1:_SUMS].sum() / rows[:, 0].sum()
            self._every = max(_FIRST_AFTER, min(round(_EVERY_S / max(step_s, 1e-6)), 100_000))
        if self._runner.chief:
            record = self._record(finished=False)
            record.write(self._options.log_dir)
            self._write_scalars(record, _workers(sums, peaks), times.total)

    def _gathered(self, values: Sequence[float]) -> np.ndarray:
        """Returns `values` of all workers.

        For all of them the next step begins to count when they part again. What the chief then writes is its overhead:
        the others wait for it.
        """
        rows = gathered_numbers(self._runner.strategy, values)
        self._previous_end = time.time()
        return rows

    def _record(self, *, finished: bool) -> RunRecord:
        workers = _workers(self._sums, self._peaks)
        report = self._hook.report
        mean = 1e3 * float(self._sums[0, 1:_SUMS].sum() / self._sums[0, 0])
        percentiles = np.percentile(self._recent, [50, 95, 99]) * 1e3
        return RunRecord(
            finished=finished,
            model=self._model,
            strategy=type(self._runner.strategy).__name__,
            num_workers=self._runner.num_workers,
            num_replicas=self._replicas,
            global_batch_size=self._global_batch,
            hook=self._hook.name,
            transport=self._hook.transport.name,
            bytes_per_step=None if report is None else report.bytes_per_step,
            link=None
            if self._link is None
            else {"latency_s": self._link.latency_s, "bytes_per_second": self._link.bytes_per_second},
            steps=int(self._sums[0, 0]),
            step_ms={"mean": mean, **dict(zip(("median", "p95", "p99"), map(float, percentiles), strict=True))},
            workers=workers,
            lost_seconds=dict(self._lost),
            flops_per_example=self._flops,
            mfu=self._mfu(mean),
            provenance=self._provenance,
        )

    def _mfu(self, step_ms: float) -> float | None:
        peak = self._options.peak_tflops or peak_tflops()
        if peak is None or self._flops is None or self._global_batch is None:
            return None
        return self._flops * self._global_batch / (step_ms / 1e3) / (peak * 1e12 * self._replicas)

    def _write_scalars(self, record: RunRecord, workers: tuple[WorkerTimes, ...], totals: np.ndarray) -> None:
        if not self._has_hparams:
            self._has_hparams = True
            hparams = {"replicas": self._replicas, "workers": self._runner.num_workers, "hook": self._hook.name}
            hparams |= {"transport": self._hook.transport.name, "global_batch_size": self._global_batch or 0}
            self._writer.write_hparams({**hparams, **(self._options.hparams or {})})
        step_ms = 1e3 * float(totals.mean())
        per_second = None if self._global_batch is None else 1e3 * self._global_batch / step_ms
        report = self._hook.report
        scalars = {
            "scaling/examples_per_second": per_second,
            "scaling/tokens_per_second": per_second and self._tokens and per_second * self._tokens,
            "scaling/examples_per_second_per_replica": per_second and per_second / self._replicas,
            "scaling/efficiency": self._efficiency(workers, per_second),
            "scaling/mfu": self._mfu(step_ms),
            "scaling/goodput": record.goodput,
            "step/time_ms": step_ms,
            "step/p95_ms": 1e3 * float(np.percentile(totals, 95)),
            "memory/peak_mb": max(worker.peak_memory_mb for worker in workers),
            **{f"time/{part}_ms": value for part, value in record.anatomy().items()},
            **{f"lost/{kind}_s": seconds for kind, seconds in self._lost.items()},
            **worker_scalars(workers),
        }
        if self._runner.num_workers > 1:
            scalars |= {"straggler/slowest_worker": record.slowest, "straggler/lag_ms": record.lag_ms}
        if report is not None and self._replicas > 1:
            scalars |= {"comm/bytes_per_step": report.bytes_per_step, "comm/fidelity": report.cosine}
            scalars["comm/compression_ratio"] = report.compression_ratio if report.bytes_per_step else None
        if self._link is not None:
            factor = 2 * (self._replicas - 1) / self._replicas
            scalars["comm/bus_bandwidth_gbps"] = factor * self._link.bytes_per_second / 1e9
        self._writer.write(self._step, scalars)

    def _efficiency(self, workers: tuple[WorkerTimes, ...], per_second: "float | None") -> float | None:
        baseline = self._options.baseline_examples_per_second
        if baseline is None:
            return float(np.mean([worker.busy_ms / worker.step_ms for worker in workers]))
        return None if per_second is None else per_second / self._replicas / baseline

    def _follow_trace(self, event: StepReport) -> None:
        first, end = self._options.trace_steps
        numbers = np.arange(event.step - event.num_steps + 1, event.step + 1)
        wanted = (numbers >= first) & (numbers < end)
        if wanted.any():
            self._first_traced = self._first_traced or int(numbers[wanted][0])
            self._trace.append(moments(dissect(event))[wanted])
        self._profile_if_due(event.step)
        if event.step >= end - 1:
            self._write_trace()

    def _write_trace(self) -> None:
        steps = np.concatenate(self._trace) if self._trace else np.zeros([0, COLUMNS])
        self._trace = None
        if not len(steps):
            return
        rows = self._gathered(steps.reshape(-1))
        if self._runner.chief:
            path = Path(self._options.log_dir) / "trace.json"
            write_trace(path, self._first_traced, rows.reshape(len(rows), -1, COLUMNS))

    def _profile_if_due(self, step: int) -> None:
        if not self._options.profile:
            return
        first, end = self._options.trace_steps
        if not self._profiling and first - 1 <= step < end - 1:
            tf.profiler.experimental.start(self._options.log_dir)
            self._profiling = True
        elif self._profiling and step >= end - 1:
            tf.profiler.experimental.stop()
            self._profiling = False


def _workers(sums: np.ndarray, peaks: np.ndarray) -> tuple[WorkerTimes, ...]:
    means = 1e3 * sums[:, 1:] / sums[:, :1]
    parts = _SUMS - 1
    return tuple(
        WorkerTimes(*map(float, row[:parts]), ready_ms=tuple(map(float, row[parts:])), peak_memory_mb=float(peak))
        for row, peak in zip(means, peaks, strict=True)
    )


def _described(model: keras.Model) -> dict[str, Any]:
    shapes = " ".join(str(tuple(weight.shape)) for weight in model.trainable_variables)
    digest = hashlib.sha256(shapes.encode()).hexdigest()
    return {"name": model.name, "parameters": int(model.count_params()), "shapes_sha256": digest}


def _tokens_per_example(model: keras.Model) -> int | None:
    """Returns the length of a sequence of tokens, where the model's input is one."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if len(inputs) != 1 or len(inputs[0].shape) != 2 or not keras.backend.is_int_dtype(inputs[0].dtype):
        return None
    return inputs[0].shape[1]


def _keep_earlier(folder: Path) -> None:
    """Gives the record of an earlier run in this folder another name."""
    path = folder / FILE_NAME
    if not path.exists():
        return
    number = 1
    while path.with_stem(f"{path.stem}-{number}").exists():
        number += 1
    path.rename(path.with_stem(f"{path.stem}-{number}"))
