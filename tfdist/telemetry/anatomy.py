"""What a step spends where: input, compute, communication, overhead."""

import dataclasses

import numpy as np

from tfdist.training.report import StepReport


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The steps of one call into the compiled loop, in seconds; one entry for each step.

    A step lasts from the end of the step before to its own end, and its four parts add up to that.

    Attributes:
        begins: when each began to wait for its input, in seconds since 1970.
        ends: when each ended.
        input: waiting for the batch.
        compute: forward pass, backward pass and optimizer.
        communication: from this replica's last gradient to the last sum over all replicas: what the backward pass did
            not hide, and waiting for slower replicas. A mean over the replicas of this process.
        overhead: between the steps: Python, callbacks, starting TensorFlow.
        ready: from the input to the last gradient, in shape (steps, replicas of this process).
    """

    begins: np.ndarray
    ends: np.ndarray
    input: np.ndarray
    compute: np.ndarray
    communication: np.ndarray
    overhead: np.ndarray
    ready: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds of each step."""
        return self.input + self.compute + self.communication + self.overhead

    @staticmethod
    def joined(times: "list[StepParts]") -> "StepParts":
        """Returns the steps of several calls, one after the other."""
        names = [field.name for field in dataclasses.fields(StepParts)]
        return StepParts(**{name: np.concatenate([getattr(t, name) for t in times]) for name in names})


def dissect(
    report: StepReport, previous_end: "float | None" = None, away: float = 0.0, agreeing: float = 0.0
) -> StepParts:
    """Returns the parts of the steps of one call.

    Args:
        report: of the call; its steps are timed.
        previous_end: when the step before it ended, in seconds since 1970; None for the first one.
        away: seconds since then that were spent on something else, such as an evaluation.
        agreeing: seconds since then in which the workers have agreed on something, which is communication.
    """
    begins, there = begin_times(report).T
    intervals = interval_times(report)
    ends = np.append(begins[1:], report.ended)
    if previous_end is None:
        previous_end = report.began
    overhead = np.zeros(len(begins))
    overhead[0] = max(0.0, begins[0] - previous_end - away - agreeing)
    waited = np.maximum(there - begins, 0.0)
    communication = np.maximum(intervals[..., 1] - intervals[..., 0], 0.0).sum(axis=2).mean(axis=1)
    compute = np.maximum(ends - np.maximum(there, begins) - communication, 0.0)
    communication[0] += agreeing
    if intervals.shape[2]:
        ready = intervals[:, :, 0, 0] - there[:, None]
    else:
        ready = np.repeat(compute[:, None], intervals.shape[1], axis=1)
    return StepParts(begins, ends, waited, compute, communication, overhead, ready)


def begin_times(report: StepReport) -> np.ndarray:
    """Returns when each step began, and when its input was there, in shape (steps, 2)."""
    if report.begins is None:
        return np.array([[report.began, report.input_there]])
    return np.asarray(report.begins).reshape(-1, 2)


def interval_times(report: StepReport) -> np.ndarray:
    """Returns begin and end of each aggregation, in shape (steps, replicas of this process, aggregations, 2)."""
    stamps = np.asarray(report.intervals)
    return stamps.reshape(report.num_steps, stamps.shape[-2], stamps.shape[-1] // 2, 2)
