"""One attempt of a job: its workers from their start to their end."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO

from tfdist.cluster.base import ATTEMPT, JOB, PLANNED_WORKERS, Cluster, slurm_job_name
from tfdist.cluster.ports import HOST, hold_ports
from tfdist.cluster.variables import MONITOR
from tfdist.errors import EXIT_WRONG_USE
from tfdist.launch.agent_wire import Order
from tfdist.launch.failure import Failure, how
from tfdist.launch.hosts import Hosts, travelling
from tfdist.launch.output import Screen
from tfdist.launch.pmi import PMIServer
from tfdist.launch.process import WorkerProcess
from tfdist.launch.remote import StartError, kept_alive, start_agents
from tfdist.launch.signals import CaughtSignals
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.watchdog import Watchdog
from tfdist.launch.worker import Worker
from tfdist.liveness import Limits, Monitor


@dataclass(frozen=True)
class Job:
    """What every attempt of a job has in common.

    Attributes:
        workers: How many workers it has when all take part.
        command: The script's path, then its arguments.
        mpi: Whether the workers are one MPI job as well.
        pin: Cores of each worker; None for all.
        start_port: The first worker's port; None for free ones.
        env: Environment variables on top of those of this process.
        limits: How long a worker may show no sign of life.
        hosts: Where the workers run; None for this machine.
        name: Tells it from all other jobs.
    """

    workers: int
    command: Sequence[str]
    mpi: bool = False
    pin: "int | None" = None
    start_port: "int | None" = None
    env: "Mapping[str, str] | None" = None
    limits: Limits = Limits()
    hosts: "Hosts | None" = None
    name: str = field(default_factory=lambda: slurm_job_name(os.environ) or secrets.token_hex(8))


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        failure: Why it failed; None where it did not.
        asked_to_stop: It ended because it was asked to, with everything saved.
        interrupted_by: The signal to the launcher that ended it, if one has.
        at: When the failure came, by the monotonic clock.
        failed_to_stop: The failure came when it was asked to stop.
        can_go_on: The job, started again, would not lose what a training has done.
    """

    failure: "Failure | None"
    asked_to_stop: bool
    interrupted_by: "int | None"
    at: float
    failed_to_stop: bool = False
    can_go_on: bool = True


def run_attempt(
    job: Job,
    number: int,
    restarts: int,
    lost_s: float,
    screen: Screen,
    logs: "Sequence[BinaryIO] | None",
    caught: CaughtSignals,
    *,
    places: Sequence[int],
    on_training: Callable[[int], None],
    on_tick: Callable[[Monitor], None],
) -> Outcome:
    """Starts the workers, and watches them to their end. Nothing is left of them then.

    Args:
        job: What to run.
        number: Which attempt this is, from 0.
        restarts: How many of those before have failed.
        lost_s: Seconds that failures have cost so far.
        screen: Where messages go.
        logs: A file for each worker's output.
        caught: The signals sent to this process.
        places: Where the workers run; their indices are the places' order here.
        on_training: Is called with the step at which training begins, when it does.
        on_tick: Is called again and again meanwhile.

    Raises:
        UsageError: There are no ports.
        StartError: A host could not be used, at the first attempt.
    """
    began = time.monotonic()
    with ExitStack() as stack, ExitStack() as held_ports:
        workers = len(places)
        started: list[WorkerProcess] = []
        watchdog = Watchdog()
        stack.callback(_reap, started)  # the last step: until then nobody else can get the ids of the groups
        stack.callback(watchdog.close)
        stack.callback(_kill, started)
        if job.hosts is None:
            ports = hold_ports(workers, held_ports, start_port=job.start_port)
            addresses, here = tuple(f"{HOST}:{port}" for port in ports), HOST
        else:
            stack.enter_context(kept_alive(started))
            try:
                interrupted_by = start_agents(job.hosts, places, screen, logs, watchdog, caught, started)
            except StartError as error:
                if number == 0:
                    raise
                return Outcome(error.as_failure(time.monotonic() - began), False, None, time.monotonic())
            if interrupted_by is not None:
                return Outcome(None, False, interrupted_by, time.monotonic())
            addresses, here = tuple(worker.address for worker in started), job.hosts.own_address(places)
        monitor = Monitor(addresses, host=here, limits=job.limits)
        stack.callback(monitor.close)
        held_ports.close()
        server = PMIServer(workers) if job.mpi else None
        if server:
            stack.callback(server.close)
        for index in range(workers):
            told = {
                "TF_CONFIG": Cluster(addresses, index, "tfdist launch").tf_config(),
                MONITOR: monitor.address,
                ATTEMPT: str(number),
                JOB: job.name,
                "TFDIST_RESTARTS": str(restarts),
                "TFDIST_LOST_SECONDS": f"{lost_s:.3f}",
                "TFDIST_PLACE": str(places[index]),
                PLANNED_WORKERS: str(job.workers) if workers < job.workers else "",
                "PYTHONUNBUFFERED": "1",
                **(server.environment(index) if server else {}),
            }
            if job.hosts is not None:
                command = [job.hosts.python, *map(os.fspath, job.command)]
                started[index].begin(Order(command, {**travelling(os.environ), **(job.env or {}), **told}, os.getcwd()))
                continue
            worker = Worker(
                index,
                [sys.executable, *map(os.fspath, job.command)],
                {**os.environ, **(job.env or {}), **told},
                screen,
                logs[index] if logs else None,
                pass_fds=(server.descriptor(index),) if server else (),
            )
            if server:
                server.started(index)
            started.append(worker)
            if job.pin:
                os.sched_setaffinity(worker.pid, _cores(index, job.pin))
            watchdog.guard(worker.pid)
        supervisor = Supervisor(started, screen, caught, monitor, on_training, on_tick)
        supervisor.run()
        failed = supervisor.first_failed
        failure = None
        if failed is not None:
            steps = monitor.steps()
            failure = Failure(
                worker=failed.index,
                host=failed.host,
                code=failed.poll() or 0,
                why=supervisor.why,
                last_lines=tuple(line.decode(errors="replace") for line in failed.tail),
                others={
                    worker.index: "killed" if worker.index in supervisor.killed else how(worker.poll() or 0)
                    for worker in started
                    if worker is not failed
                },
                step=None if steps is None else steps[1],
                after_s=supervisor.failed_at - began,
                at=time.time() - (time.monotonic() - supervisor.failed_at),
                for_good=supervisor.for_good or failed.poll() == EXIT_WRONG_USE,
            )
    return Outcome(
        failure,
        supervisor.asked_to_stop,
        supervisor.interrupted_by,
        supervisor.failed_at,
        supervisor.failed_to_stop,
        monitor.saves or not monitor.trains_unsaved,
    )


def _cores(index: int, each: int) -> set[int]:
    """Returns the cores of one worker, out of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[(index * each + i) % len(cores)] for i in range(each)}


def _kill(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.signal(signal.SIGKILL)


def _reap(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.reap()
