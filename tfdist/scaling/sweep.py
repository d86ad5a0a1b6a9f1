"""Runs the trials of a sweep, one after the other, each in fresh processes."""

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.command import end
from tfdist.errors import EXIT_WRONG_USE, UsageError
from tfdist.scaling.machine import Machine
from tfdist.scaling.plan import Plan, Trial
from tfdist.telemetry.record import FILE_NAME, RunRecord, read_record

_TAIL_LINES = 8


@dataclasses.dataclass(frozen=True)
class Failure:
    """A trial that gave no figures.

    Attributes:
        trial: which.
        why: what happened, with the last lines of its output.
    """

    trial: Trial
    why: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a sweep has found.

    Attributes:
        records: of the trials that ended well.
        failures: the others.
    """

    records: dict[Trial, RunRecord]
    failures: list[Failure]


def run_sweep(
    plan: Plan,
    out: Path,
    machine: Machine,
    *,
    timeout: float,
    progress: "Callable[[Trial, bool], None]" = lambda trial, done: None,
) -> Outcome:
    """Runs what `out` does not hold yet.

    Args:
        plan: the sweep.
        out: its folder; each trial has one in `out/runs`.
        machine: where it runs.
        timeout: seconds for a trial.
        progress: is called before and after each trial.

    Raises:
        UsageError: the command does not train, or is wrong; its output says why.
    """
    records: dict[Trial, RunRecord] = {}
    failures: list[Failure] = []
    batch = None
    lost: set[tuple[str, int]] = set()
    for trial in plan.trials():
        progress(trial, False)
        folder = out / "runs" / trial.name
        record = _finished(folder)
        if record is None and (trial.mode, trial.replicas) not in lost:
            _put_aside(folder)
            weak = {} if batch is None else {"global_batch_size": batch * trial.replicas // plan.replicas[0]}
            flags = {"log_dir": folder, **(weak if trial.mode == "weak" else {})}
            flags |= {"hook": "noop"} if trial.ceiling else {}
            code, output = _run(_command(plan, machine, trial.replicas, flags), folder, timeout)
            record = _finished(folder)
            if record is None:
                why = _why(code, output, timeout)
                if not records and (code in (0, EXIT_WRONG_USE)):
                    raise UsageError(f"the command cannot be measured: {' '.join(plan.command)}: {why}")
                failures.append(Failure(trial, why))
                lost.add((trial.mode, trial.replicas))  # it would fail again
        if record is not None:
            records[trial] = record
            batch = batch or (record.global_batch_size if trial.replicas == plan.replicas[0] else None)
        progress(trial, True)
    return Outcome(records, failures)


def _finished(folder: Path) -> RunRecord | None:
    if not (folder / FILE_NAME).is_file():
        return None
    record = read_record(folder)
    return record if record.finished else None


def _put_aside(folder: Path) -> None:
    """Keeps what an interrupted trial has left under another name."""
    number = 1
    while folder.exists():
        aside = folder.with_name(f"{folder.name}.interrupted-{number}")
        if not aside.exists():
            folder.rename(aside)
        number += 1
    folder.mkdir(parents=True)


def _command(plan: Plan, machine: Machine, replicas: int, flags: dict) -> list[str]:
    given = [*plan.command, *(f"--{name}={value}" for name, value in flags.items())]
    if plan.launcher is not None:
        return [*shlex.split(plan.launcher.format(replicas=replicas)), *given]
    if machine.gpus:
        return [sys.executable, *given, "--strategy=mirrored", f"--num_devices={replicas}"]
    # Replicas on CPUs are workers with cores of their own; one process with several would share one queue of work.
    # All sizes have the same cores for each, or one replica would be a larger device than one of two.
    pin = [f"--pin={machine.cores_each(plan.replicas[-1])}"] if hasattr(os, "sched_setaffinity") else []
    return [sys.executable, "-m", "tfdist.cli", "launch", f"--workers={replicas}", *pin, *given]


def _run(command: Sequence[str], folder: Path, timeout: float) -> tuple[int | None, str]:
    """Returns the exit code (None where the time was up) and the last lines of the output."""
    log = folder / "output.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = log.read_text(encoding="utf8", errors="replace").splitlines()
    return code, "\n".join(lines[-_TAIL_LINES:])


def _why(code: int | None, output: str, timeout: float) -> str:
    if code is None:
        return f"it did not end within {timeout:g} s (--timeout). Its last lines:\n{output}"
    if code == 0:
        return (
            f"it ended without training steps: no {FILE_NAME} in its --log_dir. It has to take the flags --log_dir, "
            "--hook and --global_batch_size, as scripts/train.py does, and to give tfdist.ScalingCallback(log_dir) to "
            f"fit or TrainLoop. Its last lines:\n{output}"
        )
    return f"exit code {code}. Its last lines:\n{output}"
