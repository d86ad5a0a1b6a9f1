"""MPI's exchanges between real processes, compared with NumPy; a peer that stays away is named."""

import subprocess
from pathlib import Path

import pytest

WORKER = str(Path(__file__).with_name("exchange_worker.py"))

ALONE = """
import time, sys
from tfdist.cluster.mpi import mpi
from tfdist.transport.engine import Engine
import numpy as np
world = mpi().COMM_WORLD
engine = Engine(world.Dup(), ["first:1", "second:2", "third:3"], timeout_s=1.0)
if world.Get_rank() == 2:
    time.sleep(100)
try:
    engine.wait(engine.sum(np.ones(1000, np.float32), 5))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_random_exchanges_in_random_orders(mpi_job, workers):
    processes = mpi_job(workers, WORKER, "25", str(100 + workers))
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and out == "equal 25\n", errors[-3000:]


def test_a_peer_that_stays_away_is_named(mpi_job):
    processes = mpi_job(3, "-c", ALONE)
    for process in processes[:2]:
        line = process.stdout.readline()
        assert line.startswith("PeerError: an exchange over MPI did not end within 1 s: nothing came from ")
        assert "worker 2 (third:3)" in line and "first" not in line and "second" not in line


def test_a_job_of_which_one_process_was_killed_does_not_wait_for_it_at_the_end(mpi_job):
    code = "from tfdist.cluster.mpi import mpi; mpi(); print('up', flush=True); import sys; sys.stdin.readline()"
    first, second = mpi_job(2, "-c", code)
    assert first.stdout.readline() == second.stdout.readline() == "up\n"
    second.kill()
    second.wait()
    first.stdin.close()
    try:
        first.wait(30)
    except subprocess.TimeoutExpired:
        pytest.fail("the process that was left did not end")


def test_unequal_shapes_are_refused_on_both_sides(mpi_job):
    code = """
import sys
from tfdist.cluster.mpi import mpi
from tfdist.transport.engine import Engine
import numpy as np
world = mpi().COMM_WORLD
engine = Engine(world.Dup(), ["first:1", "second:2"], timeout_s=20.0)
try:
    engine.wait(getattr(engine, sys.argv[1])(np.ones(1000 + 8 * world.Get_rank(), np.float32), 5))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""
    for kind, found in (("sum", "2016 bytes where this one has 2000"), ("gather", "4032 bytes")):
        first, second = mpi_job(2, "-c", code, kind)
        lines = [process.communicate(timeout=60)[0] for process in (first, second)]
        assert all(line.startswith("UsageError: worker ") for line in lines), (kind, found, lines)
        assert "what a hook sends has to have the same shape" in lines[0]
