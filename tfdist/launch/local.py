"""`tfdist launch`: a job of several workers on this machine."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from tfdist.cluster.address import shorten
from tfdist.cluster.base import Cluster
from tfdist.cluster.mpi import is_installed
from tfdist.cluster.ports import HOST, hold_ports
from tfdist.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_USE, UsageError
from tfdist.launch.logs import open_logs
from tfdist.launch.output import Screen
from tfdist.launch.pmi import PMIServer
from tfdist.launch.signals import CaughtSignals
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.watchdog import Watchdog
from tfdist.launch.worker import Worker


def launch(
    workers: int,
    command: Sequence[str],
    *,
    mpi: bool = False,
    pin: int | None = None,
    log_dir: str | os.PathLike | None = None,
    start_port: int | None = None,
    env: Mapping[str, str] | None = None,
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
        stdout: A binary stream for all output; None for this process's standard output.

    Returns:
        0 if every worker exited with 0; 2 if the first one that failed exited with 2; 128 plus the signal's
        number if a signal to this process ended the job, as shells do (130 for SIGINT, 143 for SIGTERM); else
        1.

    Raises:
        UsageError: If an argument cannot be right; nothing has been started then.
    """
    _check(workers, command, mpi, pin)
    if stdout is None:
        sys.stdout.flush()
        stdout = sys.stdout.buffer
    screen = Screen(stdout)
    with ExitStack() as stack, ExitStack() as held_ports:
        ports = hold_ports(workers, held_ports, start_port=start_port)
        addresses = tuple(f"{HOST}:{port}" for port in ports)
        logs = None if log_dir is None else open_logs(log_dir, workers, stack)
        if logs:
            last = f" to {Path(logs[-1].name).name}" if workers > 1 else ""
            screen.note(f"tfdist launch: full output in {logs[0].name}{last}".encode())
        screen.flush()
        caught = stack.enter_context(CaughtSignals())
        started: list[Worker] = []
        watchdog = Watchdog()
        stack.callback(_reap, started)  # the last step: until then nobody else can get the ids of the groups
        stack.callback(watchdog.close)
        stack.callback(_kill, started)
        held_ports.close()
        server = PMIServer(workers) if mpi else None
        if server:
            stack.callback(server.close)
        for index in range(workers):
            worker = Worker(
                index,
                [sys.executable, *map(os.fspath, command)],
                {
                    **_environment(Cluster(addresses, index, "tfdist launch"), env),
                    **(server.environment(index) if server else {}),
                },
                screen,
                logs[index] if logs else None,
                pass_fds=(server.descriptor(index),) if server else (),
            )
            if server:
                server.started(index)
            started.append(worker)
            if pin:
                os.sched_setaffinity(worker.pid, _cores(index, pin))
            watchdog.guard(worker.pid)
        supervisor = Supervisor(started, screen, caught)
        supervisor.run()
        code = _report(supervisor, screen, logs)
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


def _cores(index: int, each: int) -> set[int]:
    """Returns the cores of one worker, out of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[(index * each + i) % len(cores)] for i in range(each)}


def _environment(cluster: Cluster, extra: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(extra or {}), "TF_CONFIG": cluster.tf_config(), "PYTHONUNBUFFERED": "1"}


def _kill(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.signal(signal.SIGKILL)


def _reap(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.reap()


def _report(supervisor: Supervisor, screen: Screen, logs: Sequence[BinaryIO] | None) -> int:
    """Prints the first failing worker's last lines, if one failed, and returns the exit code of the job."""
    failed = supervisor.first_failed
    if failed is None:
        return EXIT_DONE if supervisor.interrupted_by is None else 128 + supervisor.interrupted_by
    code = failed.poll()
    where = f" (all of it: {logs[failed.index].name})" if logs else ""
    screen.note(f"tfdist launch: worker {failed.index} failed first, {_how(code)}. Its last lines{where}:".encode())
    for line in failed.tail:
        screen.line(failed.index, line)
    return EXIT_WRONG_USE if code == EXIT_WRONG_USE else EXIT_FAILED


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"  # a real-time signal
    return f"ended by {name}" + (" (is the memory full?)" if name == "SIGKILL" else "")
