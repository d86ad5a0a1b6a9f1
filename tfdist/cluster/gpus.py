"""Which of a host's GPUs are a worker's own, where several workers share the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class SeenGPUs:
    """The GPUs that one worker sees.

    Attributes:
        count: How many.
        pool: A name for them: workers of a host with the same pool see the same ones. None where the scheduler
            has given this worker its own.
    """

    count: int
    pool: str | None

    @classmethod
    def detect(cls, count: int, environ: Mapping[str, str]) -> "SeenGPUs":
        """Finds out whose the visible GPUs are.

        Args:
            count: How many this process sees.
            environ: The environment variables.

        Returns:
            The GPUs.
        """
        by_task = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        on_node = environ.get("SLURM_GPUS_ON_NODE", "")
        fewer_than_the_step = "SLURM_PROCID" in environ and on_node.isdecimal() and count < int(on_node)
        return cls(count, None if by_task or fewer_than_the_step else environ.get(_VISIBLE, "all"))


NO_GPUS = SeenGPUs(0, None)
"""What a worker without GPUs sees."""


def own_gpus(num_gpus: int, local_rank: int, local_size: int) -> range:
    """Divides the GPUs of a host evenly among its workers; those left over stay unused.

    Args:
        num_gpus: How many GPUs all of them see.
        local_rank: This worker's place among the workers of the host.
        local_size: How many workers the host has; at most `num_gpus`.

    Returns:
        The numbers of this worker's GPUs.
    """
    each = num_gpus // local_size
    return range(local_rank * each, (local_rank + 1) * each)


def sharing(hosts: Sequence[Sequence[int]], seen: Mapping[int, SeenGPUs]) -> tuple[int, ...]:
    """Finds the workers that have to divide the GPUs that they see.

    Workers of a host that see different ones, as a CUDA_VISIBLE_DEVICES of each makes them, keep them.

    Args:
        hosts: The workers of each host.
        seen: What each worker sees.

    Returns:
        The indices of those workers: either all or none of a host.
    """
    found: list[int] = []
    for workers in hosts:
        pools = {seen[worker].pool for worker in workers}
        if len(workers) > 1 and len(pools) == 1 and None not in pools and all(seen[w].count for w in workers):
            found += workers
    return tuple(found)


def find_shortage(hosts: Sequence[Sequence[int]], seen: Mapping[int, SeenGPUs]) -> tuple[str, str] | None:
    """Looks for a host with fewer GPUs than workers that have to divide them.

    Args:
        hosts: The workers of each host.
        seen: What each worker sees.

    Returns:
        None if there is none, else what is wrong, and the fix.
    """
    shared = set(sharing(hosts, seen))
    for workers in hosts:
        count = seen[workers[0]].count
        if shared.issuperset(workers) and count < len(workers):
            names = f"{', '.join(map(str, workers[:8]))}{' ...' if len(workers) > 8 else ''}"
            return (
                f"{len(workers)} workers ({names}) are on one host, but they see only {count} GPU(s) there "
                f"({_VISIBLE}={seen[workers[0]].pool[:100]})",
                f"Start at most {count} worker(s) there, each worker with a {_VISIBLE} of its own, or all with "
                f"{_VISIBLE}=-1 to train on CPUs",
            )
    return None
