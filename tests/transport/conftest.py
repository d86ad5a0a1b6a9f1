"""Starts MPI jobs that need neither TensorFlow's cluster nor a launcher."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfdist.launch.pmi import PMIServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mpi_job() -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """Starts the same Python command in several processes of one MPI job; what still runs is killed in the end."""
    servers, processes = [], []

    def start(count: int, *command: str) -> list[subprocess.Popen]:
        server = PMIServer(count)
        servers.append(server)
        for rank in range(count):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env={**environment, **server.environment(rank)},
                    pass_fds=(server.descriptor(rank),),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            server.started(rank)
        return processes[-count:]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    for server in servers:
        server.close()
