"""`tfdist launch`: a job of several workers, on this machine or on hosts that ssh reaches."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from tfdist.cluster.address import shorten
from tfdist.cluster.mpi import is_installed
from tfdist.errors import UsageError
from tfdist.launch.attempt import Job
from tfdist.launch.failure import EventLog
from tfdist.launch.health import HealthCheck
from tfdist.launch.hosts import Hosts, check_options, listed
from tfdist.launch.logs import open_logs
from tfdist.launch.output import Screen
from tfdist.launch.policy import Places, RestartBudget, RestartPolicy
from tfdist.launch.restarts import Restarts
from tfdist.launch.signals import CaughtSignals
from tfdist.liveness import Limits

_EVENTS = "events.jsonl"


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
    min_workers: int | None = None,
    health_check: str | None = None,
    restart_window: float = 3600.0,
    hang_timeout: float = 30.0,
    hosts: Hosts | None = None,
    stdout: BinaryIO | None = None,
) -> int:
    """Runs a Python script in several worker processes, and watches them.

    Each worker has a process group of its own, a free loopback port, TF_CONFIG, and no standard input. What
    it prints, standard output and error alike, comes out here with `[worker 1] ` before each line. When a
    worker fails the others are ended: those in training hear of it by their heartbeats, others get SIGTERM, and what
    is left after 5 s SIGKILL. The last lines of the one that failed first are printed last. SIGINT, SIGTERM and SIGHUP
    are passed on to the workers, which then have 30 s; a second signal kills them. A worker that writes a checkpoint
    has up to 10 minutes more. No worker, and none of its children that stayed in its group, is left behind, not even
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
        min_workers: With so many workers the job goes on where others fail again and again; the global batch stays as
            it is, as each worker does more of it. None stands for all. Workers come back when their place is well.
        health_check: A shell command that says whether a place is well, by exit code 0; it finds the number of the
            place in TFDIST_PLACE, and its host in TFDIST_HOST. It is run on this machine before each start, and from
            time to time for places that are left out.
        restart_window: Restarts that are more seconds ago do not count either.
        hang_timeout: Seconds after which a worker that is silent, or whose step does not move, counts as failed (see
            `tfdist.liveness.Limits`).
        hosts: Where the workers run, and how to reach them; None for this machine. Of this process's environment
            variables they get those that `tfdist.launch.hosts.travelling` picks.
        stdout: A binary stream for all output; None for this process's standard output.

    Returns:
        0 if every worker exited with 0; 2 if the first one that failed exited with 2; 75 if the job was asked to stop
        (SIGTERM) and goes on where it is started again; 128 plus the signal's number if a signal to this process ended
        it otherwise, as shells do (130 for SIGINT; 143 for SIGTERM where it trained without checkpoints); else 1.

    Raises:
        UsageError: If an argument cannot be right; nothing has been started then.
        PeerError: If a host cannot be used.
    """
    _check(workers, command, mpi, pin)
    if hosts is not None:
        _check_hosts(hosts, workers, mpi=mpi, pin=pin, start_port=start_port)
    policy = RestartPolicy(max_restarts, restart_window)
    places = Places(workers, workers if min_workers is None else min_workers)
    job = Job(workers, command, mpi, pin, start_port, env, Limits(hang_timeout), hosts)
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
        targets = None if hosts is None else [host.rsh_target for host in hosts.of_workers()]
        health = HealthCheck(health_check, targets)
        stack.callback(health.close)
        code = Restarts(
            job, RestartBudget(policy), places, health, screen, logs, caught, EventLog(events, screen)
        ).run()
        screen.close()
    return code


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


def _check_hosts(hosts: Hosts, workers: int, *, mpi: bool, pin: int | None, start_port: int | None) -> None:
    hosts.check()
    check_options(mpi=mpi, pin=pin, start_port=start_port)
    if workers != hosts.workers:
        raise UsageError(
            f"workers={workers} (--workers): the hosts {listed(hosts.hosts)} are for {hosts.workers} worker(s); leave "
            "--workers out, or say how many run on each host, as in h1:2,h2:2"
        )
