"""`tfdist launch`: a job of several workers on this machine."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from tfdist.cluster.address import shorten
from tfdist.cluster.mpi import is_installed
from tfdist.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_WRONG_USE, UsageError
from tfdist.launch.attempt import Job, Outcome, run_attempt
from tfdist.launch.failure import Failure, append
from tfdist.launch.logs import open_logs
from tfdist.launch.output import Screen
from tfdist.launch.policy import RestartBudget, RestartPolicy
from tfdist.launch.signals import CaughtSignals
from tfdist.liveness import Limits

_EVENTS = "events.jsonl"
_TICK_S = 0.05


def launch(
    workers: int,
    command: Sequence[str],
    *,
    mpi: bool = False,
    pin: int | None = None,
    log_dir: str | os.PathLike | None = None,
    start_port: int | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    restart_window: float = 3600.0,
    hang_timeout: float = 30.0,
    stdout: BinaryIO | None = None,
) -> int:
    """Runs a Python script in several worker processes on this machine, and watches them.

    Each worker has a process group of its own, a free loopback port, TF_CONFIG, and no standard input. What
    it prints, standard output and error alike, comes out here with `[worker 1] ` before each line. When a
    worker fails the others get SIGTERM, after 5 s SIGKILL, and the last lines of the one that failed first
    are printed last. SIGINT, SIGTERM and SIGHUP are passed on to the workers, which then have 30 s; a second
    signal kills them. No worker, and none of its children that stayed in its group, is left behind, not even
    when this process is killed with SIGKILL. (Signals are passed on only if this runs in the main thread.)

    Args:
        workers: How many workers.
        command: The script's path, then its arguments.
        mpi: Make the workers one MPI job as well, so that they can use `transport="mpi"`.
        pin: Give each worker this many cores of its own; where there are not enough, they share them evenly.
        log_dir: A folder for the whole output of each worker, `worker-0.log` and so on; None for no logs.
        start_port: Worker i gets the port `start_port + i`; None for free ones.
        env: Environment variables for the workers, on top of those of this process.
        max_restarts: Restarts without progress between them. A restart after which training went further than
            before does not count.
        restart_window: Restarts that are more seconds ago do not count either.
        hang_timeout: Seconds after which a worker that is silent, or whose step does not move, counts as failed (see
            `tfdist.liveness.Limits`).
        stdout: A binary stream for all output; None for this process's standard output.

    Returns:
        0 if every worker exited with 0; 2 if the first one that failed exited with 2; 75 if the workers were asked
        to stop and have saved all, so that the job can be started again; 128 plus the signal's number if a signal to
        this process ended the job otherwise, as shells do (130 for SIGINT, 143 for SIGTERM); else 1.

    Raises:
        UsageError: If an argument cannot be right; nothing has been started then.
    """
    _check(workers, command, mpi, pin)
    policy = RestartPolicy(max_restarts, restart_window)
    job = Job(workers, command, mpi, pin, start_port, env, Limits(hang_timeout))
    if stdout is None:
        sys.stdout.flush()
        stdout = sys.stdout.buffer
    screen = Screen(stdout)
    with ExitStack() as stack:
        logs = None if log_dir is None else open_logs(log_dir, workers, stack)
        if logs:
            last = f" to {Path(logs[-1].name).name}" if workers > 1 else ""
            screen.note(f"tfdist launch: full output in {logs[0].name}{last}".encode())
        screen.flush()
        caught = stack.enter_context(CaughtSignals())
        events = None if log_dir is None else Path(log_dir) / _EVENTS
        code = _Restarts(job, RestartBudget(policy), screen, logs, caught, events).run()
        screen.close()
    return code


class _Restarts:
    """Runs attempt after attempt, and tells of each failure."""

    def __init__(
        self,
        job: Job,
        budget: RestartBudget,
        screen: Screen,
        logs: "Sequence[BinaryIO] | None",
        caught: CaughtSignals,
        events: "Path | None",
    ) -> None:
        self._job = job
        self._budget = budget
        self._screen = screen
        self._logs = logs
        self._caught = caught
        self._events = events
        self._last: Outcome | None = None

    def run(self) -> int:
        """Returns the exit code of the job."""
        while True:
            outcome = run_attempt(self._job, self._budget.total, self._screen, self._logs, self._caught, self._trains)
            failure = outcome.failure
            if failure is None or outcome.interrupted_by is not None:
                return _code(outcome)
            self._budget.progressed(failure.step)
            wait_s = None
            if failure.code != EXIT_WRONG_USE:
                wait_s = self._budget.wait_s(time.monotonic())
            self._tell(failure, restarts=wait_s is not None)
            if wait_s is None:
                return _code(outcome)
            if interrupted_by := self._wait(outcome.at + wait_s):
                return 128 + interrupted_by
            self._last = outcome

    def _tell(self, failure: Failure, *, restarts: bool) -> None:
        """Prints the failing worker's last lines, and what comes next; the last thing printed is what matters most."""
        log = f" (all of it: {self._logs[failure.worker].name})" if self._logs else ""
        self._note(f"{failure.headline}. Its last lines{log}:")
        for line in failure.last_lines:
            self._screen.line(failure.worker, line.encode())
        if self._events is not None:
            append(self._events, {**failure.as_event(), "restarts": restarts})
        if not restarts:
            return
        for worker, how in failure.others.items():
            self._note(f"worker {worker} was ended by that, {how}")
        policy = self._budget.policy
        self._note(
            f"restart {self._budget.total} of the job, on new ports (without progress: {self._budget.spent} of "
            f"{policy.max_restarts} within {policy.window_s:g} s)"
        )

    def _trains(self, step: int) -> None:
        """Is told that training has begun, at `step`."""
        if self._last is None:
            return
        failure, lost_s = self._last.failure, time.monotonic() - self._last.at
        repeated = max(0, (failure.step or 0) - step)
        self._note(f"training goes on from step {step}: {repeated} step(s) are repeated, {lost_s:.1f} s were lost")
        if self._events is not None:
            line = {"event": "resumed", "step": step, "repeated_steps": repeated, "lost_s": round(lost_s, 3)}
            append(self._events, line)

    def _wait(self, until: float) -> "int | None":
        """Waits; returns the signal that ends the job meanwhile, if one does."""
        while True:
            if caught := self._caught.take():
                return caught[0]
            if time.monotonic() >= until:
                return None
            time.sleep(_TICK_S)

    def _note(self, text: str) -> None:
        self._screen.note(f"tfdist launch: {text}".encode())


def _code(outcome: Outcome) -> int:
    """Returns the exit code of a job that ends with this attempt."""
    failure = outcome.failure
    if failure is not None:
        return EXIT_WRONG_USE if failure.code == EXIT_WRONG_USE else EXIT_FAILED
    if outcome.asked_to_stop:
        return EXIT_REQUEUE
    return EXIT_DONE if outcome.interrupted_by is None else 128 + outcome.interrupted_by


def _check(workers: int, command: Sequence[str], mpi: bool, pin: int | None) -> None:
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(f"workers={shorten(workers)} has to be an integer of at least 1")
    if isinstance(command, str | bytes) or not command:
        raise UsageError(f"command={shorten(command)} has to be a list: the script's path, then its arguments")
    if pin is not None and not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"pin={pin} (--pin): this system does not let a process choose its cores; leave it out")
    if pin is not None:
        cores = len(os.sched_getaffinity(0))
        if not isinstance(pin, int) or isinstance(pin, bool) or not 1 <= pin <= cores:
            raise UsageError(f"pin={pin} (--pin): a number of cores from 1 to {cores} is needed")
    if mpi and not is_installed():
        raise UsageError("mpi=True (--mpi): mpi4py is not installed; pip install 'tfdist[mpi]'")
    script = Path(command[0])
    if not script.is_file():
        problem = "is a folder, not a file" if script.is_dir() else "does not exist"
        raise UsageError(f"the script {shorten(str(script))} {problem}; give the path of a Python file")
