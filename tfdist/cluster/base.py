"""The workers of a job, and the seam through which a scheduler tells them."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.cluster.address import check_addresses, group_by_host, shorten
from tfdist.errors import UsageError

PLANNED_WORKERS = "TFDIST_PLANNED_WORKERS"
"""The variable that says for how many workers a job was made, where fewer are left."""
ATTEMPT = "TFDIST_ATTEMPT"
"""The variable that says how often the launcher has started the job before."""
JOB = "TFDIST_JOB"
"""The variable that tells this job from all others; it is the same at each of its starts."""

_LOCAL_WORKERS = ("localhost",)
"""The worker list of a job of one worker: nobody connects to it, so it has no port."""


@dataclass(frozen=True)
class Cluster:
    """The workers of one job and which of them this process is.

    Attributes:
        workers: The address `host:port` of every worker; worker 0 is the chief. Only the cluster made by
            `Cluster.local()` has an address without a port.
        index: This process's place in `workers`.
        source: Where this was read from, for messages: 'TF_CONFIG', 'local', ...
    """

    workers: tuple[str, ...]
    index: int
    source: str

    def __post_init__(self) -> None:
        """Checks the fields; raises UsageError."""
        if not isinstance(self.workers, tuple) or not self.workers:
            raise UsageError(f"workers={shorten(self.workers)} has to be a tuple of at least one address host:port")
        if self.workers != _LOCAL_WORKERS:
            check_addresses(self.workers)
        if not isinstance(self.index, int) or isinstance(self.index, bool):
            raise UsageError(f"the worker index {shorten(self.index)} has to be an integer from 0 to {self._last}")
        if not 0 <= self.index <= self._last:
            raise UsageError(
                f"the worker index {shorten(self.index)} is outside the list of {len(self.workers)} "
                f"worker(s); it has to be from 0 to {self._last}"
            )

    @classmethod
    def local(cls) -> "Cluster":
        """Makes the cluster of one worker that has no peers and needs no port.

        Returns:
            A cluster whose `is_local` is true.
        """
        return cls(workers=_LOCAL_WORKERS, index=0, source="local")

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> "Cluster":
        """Finds the cluster that this process is part of.

        Asks the known environments in order (TF_CONFIG first); where none is present this process is alone.

        Args:
            environ: The environment variables; None means those of this process.

        Returns:
            The cluster of the first environment that is present, else `Cluster.local()`.

        Raises:
            UsageError: If that environment is present but says something that cannot be right.
        """
        from tfdist.cluster.environments import ENVIRONMENTS  # they import this module

        environ = os.environ if environ is None else environ
        for environment in ENVIRONMENTS:
            if environment.is_present(environ):
                return environment.read(environ)
        return cls.local()

    @property
    def _last(self) -> int:
        return len(self.workers) - 1

    @property
    def num_workers(self) -> int:
        """How many workers the job has."""
        return len(self.workers)

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, the one that writes what all share."""
        return self.index == 0

    @property
    def is_local(self) -> bool:
        """Whether this is a lone worker without an address that others could reach."""
        return self.workers == _LOCAL_WORKERS

    @property
    def address(self) -> str:
        """This worker's own address."""
        return self.workers[self.index]

    @property
    def local_rank(self) -> int:
        """This worker's place among the workers of its host, from 0 in the order of their indices."""
        return self._peers.index(self.index)

    @property
    def local_size(self) -> int:
        """How many workers this worker's host has, this one included. Hosts are told apart as addresses name them."""
        return len(self._peers)

    @property
    def _peers(self) -> tuple[int, ...]:
        """The workers of this worker's host."""
        return next(workers for workers in self.hosts if self.index in workers)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each host. Hosts are told apart as addresses name them."""
        return ((0,),) if self.is_local else tuple(group_by_host(self.workers))

    def tf_config(self) -> str:
        """Says this cluster in TensorFlow's terms.

        Returns:
            The value of TF_CONFIG for this worker, every worker listed as type 'worker' (a chief is worker
            0). For a local cluster '{}', which TensorFlow reads as no cluster.
        """
        if self.is_local:
            return "{}"
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": {"worker": list(self.workers)}, "task": task})


def missing_share(num_workers: int, environ: Mapping[str, str] | None = None) -> int:
    """Returns how many times its part of the work a worker has to do, as some of the job's workers are missing.

    Args:
        num_workers: The workers that are there.
        environ: The environment variables; None means those of this process.
    """
    planned = (os.environ if environ is None else environ).get(PLANNED_WORKERS, "")
    return max(1, -(-int(planned) // num_workers)) if planned.isdecimal() else 1


def is_started_again(environ: Mapping[str, str] | None = None) -> bool:
    """Says whether the launcher, or Slurm, has started this job before: after a failure, or with other workers.

    Args:
        environ: The environment variables; None means those of this process.
    """
    environ = os.environ if environ is None else environ
    return any(environ.get(name, "0") not in ("", "0") for name in (ATTEMPT, "SLURM_RESTART_COUNT"))


def job_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns what tells this job from all others, and is the same at each of its starts; None where nothing does.

    Args:
        environ: The environment variables; None means those of this process.
    """
    environ = os.environ if environ is None else environ
    return environ.get(JOB) or slurm_job_name(environ)


def slurm_job_name(environ: Mapping[str, str]) -> str | None:
    """Returns such a name of a Slurm job, which keeps its number where it is requeued; None outside of Slurm."""
    number = environ.get("SLURM_JOB_ID")
    return f"slurm-{number}" if number else None


class ClusterEnvironment(ABC):
    """One way in which a job tells its processes who they are: a scheduler, a launcher, a variable."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for messages and for `Cluster.source`."""

    @abstractmethod
    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Says whether this environment describes the job.

        Args:
            environ: The environment variables.

        Returns:
            True if `read` is to be asked.
        """

    @abstractmethod
    def read(self, environ: Mapping[str, str]) -> Cluster:
        """Reads the cluster.

        Args:
            environ: The environment variables, for which `is_present` was true.

        Returns:
            The cluster, with `source` set to `name`.

        Raises:
            UsageError: If what the environment says cannot be right.
        """
