"""Runs a script as two workers over a link, or as one alone, and returns the JSON that the first one writes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.bench.links import Link
from tfdist.cluster.ports import hold_ports
from tfdist.launch.pmi import PMIServer


def run_alone(script: Path, arguments: Sequence[str], timeout: float) -> dict:
    """Runs one worker without TF_CONFIG; the script's last argument is the file to write."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, str(script), *arguments, str(out)]
        subprocess.run(command, check=True, timeout=timeout, env=_environment(), stdout=sys.stderr)
        return json.loads(out.read_text())


def run_pair(script: Path, arguments: Sequence[str], link: Link, timeout: float, *, mpi: bool = False) -> dict:
    """Runs two workers with TF_CONFIG, one at each end of `link`; with `mpi` they are an MPI job as well.

    Raises:
        RuntimeError: a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, str(script), *arguments, str(out)]
        with ExitStack() as held:  # free on this machine's loopback; a new namespace has all of them
            ports = hold_ports(2, held)
        addresses = [f"{host}:{port}" for host, port in zip(link.hosts, ports, strict=True)]
        workers = []
        server = PMIServer(2) if mpi else None
        try:
            for index, prefix in enumerate(link.prefixes):
                task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                own = {**_environment(), **link.environments[index], "TF_CONFIG": json.dumps(task)}
                own |= server.environment(index) if server else {}
                given = (server.descriptor(index),) if server else ()
                workers.append(subprocess.Popen([*prefix, *command], env=own, stdout=sys.stderr, pass_fds=given))
                if server:
                    server.started(index)
            codes = [worker.wait(timeout) for worker in workers]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
            if server:
                server.close()
        if any(codes):
            raise RuntimeError(f"{script.name} over {link.name}: the workers ended with {codes}; see above")
        return json.loads(out.read_text())


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return {**kept, "KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "1"}
