"""Reads the cluster from what Slurm's srun tells each task."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.address import shorten
from tfdist.cluster.base import Cluster, ClusterEnvironment
from tfdist.cluster.ports import HOST
from tfdist.errors import UsageError

_TASKS = "SLURM_STEP_NUM_TASKS"
_NODES = "SLURM_STEP_NODELIST"
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_MOST_TASKS = 100_000
_MOST_ON_A_NODE = 1_000
_FIRST_PORT, _PORTS = 10_000, 20_000  # below the ports that Linux gives to those who ask for any


class SlurmEnvironment(ClusterEnvironment):
    """A task of a step that `srun` has started; tasks are workers, in the order of their ranks.

    A script that sbatch runs is no such task: it trains alone, or starts the workers by `srun python train.py`.
    """

    @property
    def name(self) -> str:
        """The name for messages."""
        return "Slurm"

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Says whether srun has started this process together with others.

        Args:
            environ: The environment variables.

        Returns:
            True in a step of several tasks.
        """
        return "SLURM_PROCID" in environ and environ.get(_TASKS, "1").strip() != "1"

    def read(self, environ: Mapping[str, str]) -> Cluster:
        """Finds the tasks' nodes, and gives each a port that follows from the job's and the step's number.

        Args:
            environ: The environment variables.

        Returns:
            The cluster.

        Raises:
            UsageError: If a variable is missing or does not fit the others; the message names it.
        """
        count = _number(environ, _TASKS, least=1, most=_MOST_TASKS)
        rank = _number(environ, "SLURM_PROCID", least=0)
        if rank >= count:
            raise UsageError(f"Slurm: SLURM_PROCID={rank} is no task of {_TASKS}={count}; set TF_CONFIG instead")
        nodes = expand_nodes(_value(environ, _NODES))
        counts = expand_counts(_value(environ, _PER_NODE))
        if len(nodes) != len(counts) or sum(counts) != count:
            raise UsageError(
                f"Slurm: {_NODES}={shorten(environ[_NODES])} has {len(nodes)} node(s) and "
                f"{_PER_NODE}={shorten(environ[_PER_NODE])} has {sum(counts)} task(s) on {len(counts)}, but "
                f"{_TASKS}={count}; set TF_CONFIG instead"
            )
        if max(counts) > _MOST_ON_A_NODE:
            raise UsageError(
                f"Slurm: {_PER_NODE}={shorten(environ[_PER_NODE])}: at most {_MOST_ON_A_NODE} tasks on a node have "
                "ports; start fewer, or set TF_CONFIG"
            )
        places = _places(counts, environ.get("SLURM_DISTRIBUTION", "block"))
        own = (_number(environ, "SLURM_NODEID", least=0), _number(environ, "SLURM_LOCALID", least=0))
        if places[rank] != own:
            raise UsageError(
                f"Slurm: SLURM_PROCID={rank} comes with SLURM_NODEID={own[0]} and SLURM_LOCALID={own[1]}, where "
                f"{places[rank][0]} and {places[rank][1]} were expected, as {_PER_NODE} says; start with "
                "srun --distribution=block, or set TF_CONFIG"
            )
        job, step = (_number(environ, name, least=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        first = _FIRST_PORT + (101 * job + 1009 * step) % (_PORTS - _MOST_ON_A_NODE)
        hosts = nodes if len(nodes) > 1 else [HOST]
        return Cluster(tuple(f"{hosts[node]}:{first + task}" for node, task in places), rank, self.name)


def expand_nodes(text: str) -> list[str]:
    """Returns the nodes of a list such as n[01-03,07],m5, in order.

    Raises:
        UsageError: If it is no such list.
    """
    nodes: list[str] = []
    # A comma within brackets does not end a part.
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[,\[\]]", text):
        if part == ",":
            continue
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if part in "[]" or not re.fullmatch(r"[A-Za-z0-9_.-]*", "".join(pieces[::2])):
            raise _no_list(text)
        choices = [_range(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(nodes) + math.prod(map(len, choices)) > _MOST_TASKS:
            raise _no_list(text)
        nodes += ["".join(name) for name in itertools.product(*choices)]
    if not nodes or len(set(nodes)) != len(nodes):
        raise _no_list(text)
    return nodes


def expand_counts(text: str) -> list[int]:
    """Returns how many tasks each node has, of a text such as 2(x3),1.

    Raises:
        UsageError: If it is no such text.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([0-9]{1,6})\))?", part.strip())
        if found is None or len(counts) + int(found[2] or 1) > _MOST_TASKS:
            raise UsageError(f"Slurm: {_PER_NODE}={shorten(text)} is not of the form 2(x3),1; set TF_CONFIG instead")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _range(text: str, whole: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < first + _MOST_TASKS:
            raise _no_list(whole)
        names += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
        if len(names) > _MOST_TASKS:
            raise _no_list(whole)
    return names


def _no_list(text: str) -> UsageError:
    return UsageError(f"Slurm: {_NODES}={shorten(text)} is no list of nodes such as n[01-03,07]; set TF_CONFIG instead")


def _places(counts: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Returns the node of each rank and its number there."""
    blocks = [(node, task) for node, count in enumerate(counts) for task in range(count)]
    if distribution.split(":")[0].split(",")[0] != "cyclic":
        return blocks
    return sorted(blocks, key=lambda place: place[::-1])


def _value(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name, "").strip():
        raise UsageError(f"Slurm: {name} is not set, which srun sets; start with srun, or set TF_CONFIG")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, *, least: int, most: int | None = None) -> int:
    text = _value(environ, name).strip()
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least or (most is not None and int(text) > most):
        allowed = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise UsageError(f"Slurm: {name}={shorten(text)}: an integer {allowed} is needed; set TF_CONFIG instead")
    return int(text)
