"""The cluster of processes that mpiexec has started."""

import functools
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from tfdist.cluster.base import Cluster, ClusterEnvironment
from tfdist.cluster.mpi import is_installed, is_told, mpi, place, processes
from tfdist.cluster.ports import HOST, hold_ports
from tfdist.cluster.sockets import address_towards
from tfdist.errors import UsageError


class MPIEnvironment(ClusterEnvironment):
    """A process that mpiexec started: ranks are worker indices, and the workers tell each other their addresses."""

    @property
    def name(self) -> str:
        """The name for messages."""
        return "MPI"

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Says whether MPI started this process together with others.

        Args:
            environ: The environment variables.

        Returns:
            True if there are others, or if what MPI says cannot be right.
        """
        return is_told(environ) and processes(environ) != 1

    def read(self, environ: Mapping[str, str]) -> Cluster:
        """Finds a free port and exchanges addresses with the other processes. All of them have to call it.

        Args:
            environ: The environment variables.

        Returns:
            The cluster.

        Raises:
            UsageError: If MPI's variables cannot be right, if mpi4py is missing, or if it belongs to another MPI than
                the one that started the processes.
        """
        _, count = place(environ) or (0, 1)
        if not is_installed():
            raise UsageError(
                f"MPI has started {count} processes, but mpi4py is missing, through which they find each other; "
                "pip install 'tfdist[mpi]', or set TF_CONFIG"
            )
        world = mpi().COMM_WORLD
        if world.Get_size() != count:
            raise UsageError(
                f"mpiexec has started {count} processes, but mpi4py sees {world.Get_size()}: it was built for another "
                "MPI. Use the mpiexec of that one, or set TF_CONFIG"
            )
        return Cluster(_addresses(), world.Get_rank(), self.name)


@functools.cache
def _addresses() -> tuple[str, ...]:
    """Returns an address of every process; asked for again, the same ones, without another exchange."""
    world = mpi().COMM_WORLD
    machines = world.allgather(socket.gethostname())
    host = HOST if len(set(machines)) == 1 else _address_towards(machines, machines[world.Get_rank()])
    with ExitStack() as stack:
        port = hold_ports(1, stack, host=host)[0]
        # Ports are held until all are known: no two processes of one machine get the same.
        return tuple(world.allgather(f"{host}:{port}"))


def _address_towards(machines: list[str], own: str) -> str:
    """Returns the address of this machine on the network on which the first other one is."""
    other = next(machine for machine in machines if machine != own)
    try:
        return address_towards(other)
    except OSError as error:
        raise UsageError(
            f"MPI has started processes on {own} and {other}, but {own} does not know an address of {other} ({error}); "
            "make the names of the machines known to each other, or set TF_CONFIG"
        ) from None
