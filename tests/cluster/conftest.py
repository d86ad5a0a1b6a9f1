"""Helpers for the tests of the cluster: free ports, several workers meeting at once, a Slurm."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.cluster.slurm_daemons import Slurm, running_slurm, why_not
from tfdist.cluster import Cluster, rendezvous
from tfdist.cluster.ports import HOST, hold_ports


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of one node with two CPUs, on this machine."""
    if reason := why_not():
        pytest.skip(reason)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def addresses() -> Callable[[int], tuple[str, ...]]:
    """Gives as many loopback addresses with a free port as asked for."""

    def pick(count: int) -> tuple[str, ...]:
        with ExitStack() as held:
            return tuple(f"{HOST}:{port}" for port in hold_ports(count, held))

    return pick


@pytest.fixture
def meet_all() -> Callable[[list[Callable[[], object]]], list]:
    """Calls all of several functions at once; returns what each returned or raised."""

    def run(calls: list[Callable[[], object]]) -> list:
        def one(call: Callable[[], object]) -> object:
            try:
                return call()
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(one, calls))

    return run


@pytest.fixture
def meet(meet_all: Callable[..., list]) -> Callable[..., list]:
    """Runs the rendezvous of several workers at once; returns what each got or raised."""

    def run(clusters: list[Cluster], *, timeout_s: float = 10.0, seeds: list | None = None) -> list:
        def call(place: int) -> Callable[[], object]:
            seed = seeds[place] if seeds else None
            return lambda: rendezvous(clusters[place], timeout_s=timeout_s, seed=seed)

        return meet_all([call(place) for place in range(len(clusters))])

    return run


@pytest.fixture
def assert_free() -> Callable[[str], None]:
    """Checks that a server can take an address at once, as TensorFlow's does."""

    def check(address: str) -> None:
        host, port = address.split(":")
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, int(port)))
            server.listen()

    return check
