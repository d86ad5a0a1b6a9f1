"""Reads the cluster in a pod of an Indexed Job or JobSet, such as `tfdist launch --render=kubernetes` writes."""

import re
from collections.abc import Mapping

from tfdist.cluster.address import MAX_PORT, shorten
from tfdist.cluster.base import Cluster, ClusterEnvironment
from tfdist.errors import UsageError

INDEX = "JOB_COMPLETION_INDEX"
WORKERS = "TFDIST_WORKERS"
HOST = "TFDIST_WORKER_HOST"
PORT = "TFDIST_PORT"
_MOST_WORKERS = 100_000
_LONGEST_HOST = 253  # of a name in the DNS
_FIX = "`tfdist launch --render=kubernetes` writes a job that sets it"


class KubernetesEnvironment(ClusterEnvironment):
    """A pod of an Indexed Job; its index is the worker's, and three variables of the job say who the others are.

    An Indexed Job without them may be something else, such as a sweep whose pods train alone.
    """

    @property
    def name(self) -> str:
        """The name for messages."""
        return "Kubernetes"

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Says whether Kubernetes has numbered this pod and the job says how many workers there are.

        Args:
            environ: The environment variables.

        Returns:
            True if both variables are set.
        """
        return WORKERS in environ and INDEX in environ

    def read(self, environ: Mapping[str, str]) -> Cluster:
        """Reads the number of workers, this one's index, the pattern of their host names and their port.

        Args:
            environ: The environment variables.

        Returns:
            The cluster.

        Raises:
            UsageError: If a variable is missing or cannot be right; the message names it.
        """
        count = _number(environ, WORKERS, 1, _MOST_WORKERS)
        index = _number(environ, INDEX, 0, _MOST_WORKERS - 1)
        if index >= count:
            raise UsageError(
                f"Kubernetes: {INDEX}={index} is no worker of {WORKERS}={count}: from 0 to {count - 1}; {_FIX}"
            )
        port = _number(environ, PORT, 1, MAX_PORT)
        host = environ.get(HOST, "").strip()
        if not re.fullmatch(r"[A-Za-z0-9._-]*\{\}[A-Za-z0-9._-]*", host) or len(host) > _LONGEST_HOST:
            raise UsageError(
                f"Kubernetes: {HOST}={shorten(host)}: a host name with {{}} in the place of the worker's index is "
                f"needed, such as train-workers-0-{{}}.train; {_FIX}"
            )
        workers = tuple(f"{host.replace('{}', str(worker))}:{port}" for worker in range(count))
        return Cluster(workers, index, self.name)


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ.get(name, "").strip()
    if not re.fullmatch(r"[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise UsageError(f"Kubernetes: {name}={shorten(text)}: an integer from {least} to {most} is needed; {_FIX}")
    return int(text)
