"""A Slurm of one node with two CPUs on this machine, whose daemons end with the fixture."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tfdist.cluster.ports import hold_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
_START_S = 60.0
_END_S = 20.0

_CONFIGURATION = """\
ClusterName=tfdist
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobRequeue=1
ReturnToService=2
KillWait=5
MessageTimeout=30
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        folder: Where its daemons keep what they write.
    """

    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the environment of this process, without another Slurm's variables, for commands of this Slurm.

        The `python` of jobs is the one that runs the tests.
        """
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TF_CONFIG"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**own, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def run(self, *command: str, timeout: float = 30, **options: object) -> subprocess.CompletedProcess:
        """Runs one of Slurm's commands to its end."""
        return subprocess.run(
            command,
            **{"env": self.environment(), "capture_output": True, "text": True, "timeout": timeout, **options},
            check=False,
        )

    def job(self, number: str) -> dict[str, str]:
        """Returns what `scontrol show job` says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, *states: str, timeout: float) -> dict[str, str]:
        """Waits until a job is in one of `states`; returns what is known of it."""
        deadline = time.monotonic() + timeout
        while (job := self.job(number)).get("JobState") not in states:
            assert time.monotonic() < deadline, f"waited for {states}: {job}\n{self.logs()}"
            time.sleep(0.2)
        return job

    def logs(self) -> str:
        """Returns the ends of the daemons' logs, for messages."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def why_not() -> str | None:
    """Returns why no Slurm can be started on this machine; None where one can."""
    missing = [program for program in PROGRAMS if not _path(program)]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurmctld slurmd slurm-client munge"
    return "slurmd runs jobs as root only" if os.geteuid() != 0 else None


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Starts a Slurm; at the end cancels its jobs and ends its daemons.

    Args:
        folder: An empty folder for all that it writes.

    Yields:
        The Slurm, with its node idle.
    """
    slurm = Slurm(folder)
    _write_files(folder)
    with ExitStack() as stack:
        _start(
            stack,
            slurm,
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            *(f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")),
        )
        _wait(slurm, (folder / "munge.socket").exists, "socket of munged")
        _start(stack, slurm, "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        _start(stack, slurm, "slurmd", "-D", "-f", f"{folder}/slurm.conf")
        _wait(slurm, lambda: slurm.run("sinfo", "-h", "-o", "%T").stdout.split() == ["idle"], "an idle node")
        stack.callback(_cancel_all, slurm)
        yield slurm


def _path(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _write_files(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "plugstack.conf").write_text("")
    with ExitStack() as held:
        controller_port, node_port = hold_ports(2, held)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            controller_port=controller_port,
            node_port=node_port,
        )
    )


def _start(stack: ExitStack, slurm: Slurm, program: str, *arguments: str) -> None:
    output = stack.enter_context((slurm.folder / f"{program}.output.log").open("wb"))
    process = subprocess.Popen(
        [_path(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=slurm.environment(),
        start_new_session=True,
    )
    stack.callback(_end, process)


def _end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(slurm: Slurm, is_there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_S
    while not is_there():
        assert time.monotonic() < deadline, f"no {what} after {_START_S:g} s\n{slurm.logs()}"
        time.sleep(0.1)


def _cancel_all(slurm: Slurm) -> None:
    """Ends the jobs, and waits until their processes are gone: they are slurmstepd's, not ours to wait for."""
    slurm.run("scancel", "--signal=KILL", "--full", "--user=root")
    slurm.run("scancel", "--user=root")
    _wait(slurm, lambda: not slurm.run("squeue", "-h").stdout.strip(), "end of the jobs")
