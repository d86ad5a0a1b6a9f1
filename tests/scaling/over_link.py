"""over_link.py REPLICAS SCRIPT ARGS: one worker alone, or two at the ends of a link of 100 Mbit/s."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.links import link
from tfdist.cluster.ports import hold_ports


def main(replicas, command):
    with link("100mbit") as ends, ExitStack() as held:
        ports = hold_ports(2, held)
        held.close()
        addresses = [f"{host}:{port}" for host, port in zip(ends.hosts, ports, strict=True)][:replicas]
        cores = sorted(os.sched_getaffinity(0))
        workers = []
        try:
            for index, prefix in list(enumerate(ends.prefixes))[:replicas]:
                task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                env = {**os.environ, "TF_CONFIG": json.dumps(task)}
                worker = subprocess.Popen([*prefix, sys.executable, *command], env=env)
                os.sched_setaffinity(worker.pid, {cores[index % len(cores)]})
                workers.append(worker)
            return max(worker.wait() for worker in workers)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
