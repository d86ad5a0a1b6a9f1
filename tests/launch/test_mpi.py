"""`tfdist launch --mpi`, and jobs under mpiexec."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHO = """
from tfdist.cluster.mpi import mpi
world = mpi().COMM_WORLD
write(f"rank{index}", json.dumps([world.Get_rank(), world.Get_size(), world.allgather(index)]))
"""
DETECT = """
import sys, tfdist.cluster
for _ in range(2):
    found = tfdist.cluster.Cluster.detect()
with open(f"{sys.argv[1]}/{found.index}", "w") as file:
    print(found.source, *found.workers, file=file)
"""


def launch(script: str, *options: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli", "launch", *options, script],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_ranks_are_worker_indices(script, tmp_path):
    done = launch(script(WHO), "--mpi", "--workers=3")
    assert done.returncode == 0, done.stdout
    for index in range(3):
        assert json.loads((tmp_path / f"rank{index}").read_text()) == [index, 3, [0, 1, 2]]


def test_without_the_option_there_is_no_mpi_job(script, tmp_path):
    code = "from tfdist.cluster.mpi import processes\nwrite(f'none{index}', str(processes()))"
    assert launch(script(code), "--workers=2").returncode == 0
    assert (tmp_path / "none1").read_text() == "0"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="only Linux shows shared memory as files")
def test_a_killed_job_leaves_no_shared_memory(script, tmp_path):
    """MPICH names it by a hash, which the server of PMI computes too."""
    body = (
        "write(f'maps{index}', Path('/proc/self/maps').read_text())\n"
        "for other in range(2):\n    wait_for(f'maps{other}')\nos.kill(os.getpid(), 9)\n"
    )
    assert launch(script(WHO + body), "--mpi", "--workers=2").returncode == 1
    shared = set(re.findall(r"/dev/shm/mpich_shm\S+", (tmp_path / "maps0").read_text()))
    assert len(shared) == 1 and not os.path.exists(shared.pop())


def test_two_jobs_at_once(script, tmp_path):
    body = WHO + "write(f'up{index}')\nwait_for('go')\n"
    path = script(body)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(path, other / "script.py")
    command = [sys.executable, "-m", "tfdist.cli", "launch", "--mpi", "--workers=2"]
    jobs = [subprocess.Popen([*command, script], cwd=ROOT) for script in (path, str(other / "script.py"))]
    (tmp_path / "go").touch()
    (other / "go").touch()
    assert [job.wait(60) for job in jobs] == [0, 0]


def test_a_worker_that_fails_ends_the_job(script):
    done = launch(script(WHO + "if index == 1: sys.exit(3)\ntime.sleep(60)"), "--mpi", "--workers=2", timeout=40)
    assert done.returncode == 1 and "worker 1 failed first, with exit code 3" in done.stdout


def test_a_worker_that_is_killed_while_mpi_starts_ends_the_job(script):
    done = launch(script("if index == 1: os.kill(os.getpid(), 9)\n" + WHO), "--mpi", "--workers=2", timeout=40)
    assert done.returncode == 1 and "worker 1 failed first, ended by SIGKILL" in done.stdout


def test_without_mpi4py_it_is_wrong_use(script, tmp_path):
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py'] = None\n")
    done = launch(script(WHO), "--mpi", "--workers=2", PYTHONPATH=f"{hide}{os.pathsep}{ROOT}")
    assert done.returncode == 2 and "mpi4py is not installed; pip install 'tfdist[mpi]'" in done.stderr


@pytest.mark.parametrize("count", [1, 3])
def test_a_job_under_mpiexec(count, tmp_path):
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("the mpich wheel is not installed in this environment, which has its mpiexec")
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [mpiexec, "-n", str(count), sys.executable, "-c", DETECT, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / str(i)).read_text().split() for i in range(count)]
    assert len({tuple(words) for words in found}) == 1
    source, *addresses = found[0]
    if count == 1:
        assert (source, addresses) == ("local", ["localhost"])
        return
    assert source == "MPI" and len(set(addresses)) == count
    assert all(address.startswith("127.0.0.1:") for address in addresses)
