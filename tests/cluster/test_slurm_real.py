"""Jobs of a real Slurm: tasks that srun starts, and the script that `tfdist launch --render=slurm` writes."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.slurm_daemons import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_ROOT = Path(__file__).resolve().parents[2]

_SUM = """
import tensorflow as tf
import tfdist

cluster = tfdist.Cluster.detect()
strategy = tfdist.make_strategy("auto", start_timeout=90)
total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(cluster.index + 1.0)), axis=None)
place = f"{cluster.local_rank} of {cluster.local_size}"
print(f"{cluster.source}: {cluster.index} of {cluster.num_workers}, {place} here, total {float(total)}", flush=True)
"""

_RUN = """
import json, os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # as a worker that saves, and wants to be started again
rank, run = os.environ["SLURM_PROCID"], os.environ.get("SLURM_RESTART_COUNT", "0")
print("run", run, "task", rank, json.dumps(sys.argv[4:]), flush=True)
marker = Path(f"{sys.argv[1]}.{rank}")
if marker.exists():
    sys.exit(int(sys.argv[3]))
marker.touch()
while sys.argv[2] == "wait":
    time.sleep(0.1)
sys.exit(75)
"""


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Callable[..., str]:
    """Submits a job of two workers as `tfdist launch --render=slurm` writes it; returns its number."""

    def run(*command: str, options: Sequence[str] = ()) -> str:
        made = slurm.run(
            *(sys.executable, "-m", "tfdist.cli", "launch", "--workers=2", "--render=slurm"),
            *(f"--render_to={tmp_path}/job.sh", f"--render_option=output={tmp_path}/its output"),
            *(f"--render_option={option}" for option in options),
            *command,
        )
        assert made.returncode == 0, made.stderr
        submitted = slurm.run("sbatch", "--parsable", f"{tmp_path}/job.sh")
        assert submitted.returncode == 0, submitted.stderr
        return submitted.stdout.strip()

    return run


@pytest.fixture
def small_run(tmp_path: Path) -> list[str]:
    """Writes a script whose tasks exit with 75 in their first run; returns its path and first argument."""
    (tmp_path / "run.py").write_text(_RUN)
    return [f"{tmp_path}/run.py", f"{tmp_path}/marker"]


def _wait_for_output(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("task") < count:
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no output"
        time.sleep(0.1)


def test_tasks_of_srun_are_one_cluster_and_train_together(slurm, tmp_path):
    (tmp_path / "sum.py").write_text(_SUM)
    done = slurm.run("srun", "-n2", sys.executable, f"{tmp_path}/sum.py", timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall("Slurm: .*", done.stdout)) == [
        f"Slurm: {index} of 2, {index} of 2 here, total 3.0" for index in range(2)
    ]


def test_a_preempted_job_runs_again(slurm, submit, small_run, tmp_path):
    argument = "$HOME 'and' \"more\"\n"
    job = submit(*small_run, "go", "0", argument)
    found = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout=60)
    output = (tmp_path / "its output").read_text()
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("COMPLETED", "1", "0:0"), output
    arguments = json.dumps([argument])
    expected = [f"run {run} task {rank} {arguments}" for run in range(2) for rank in range(2)]
    assert sorted(re.findall("run .*", output)) == expected, output


@pytest.mark.parametrize("code", [1, 2, 3])
def test_the_exit_code_is_the_job_s(code, slurm, submit, small_run, tmp_path):
    for rank in range(2):
        (tmp_path / f"marker.{rank}").touch()
    found = slurm.wait_for(submit(*small_run, "go", str(code)), "COMPLETED", "FAILED", "CANCELLED", timeout=60)
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("FAILED", "0", f"{code}:0")


def test_near_the_end_of_its_time_a_job_saves_and_runs_again(slurm, submit, small_run, tmp_path):
    job = submit(*small_run, "wait", "0", options=["time=10"])
    _wait_for_output(tmp_path / "its output", 2)
    changed = slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # minutes, of which the last 2 are short
    assert changed.returncode == 0, changed.stderr
    found = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout=120)
    output = (tmp_path / "its output").read_text()
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), output


def test_a_preempted_training_goes_on_where_it_was(slurm, submit, tmp_path):
    checkpoints, summary = tmp_path / "checkpoints", tmp_path / "summary.json"
    job = submit(
        *(str(_ROOT / "scripts/train.py"), "--strategy=multi_worker", "--model=mlp", "--data=digits", "--loop=custom"),
        *("--steps=4000", "--steps_per_loop=5", f"--checkpoint_dir={checkpoints}", "--checkpoint_every=500"),
        f"--summary_json={summary}",
    )
    deadline = time.monotonic() + 150
    while not list(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline, (tmp_path / "its output").read_text()
        time.sleep(0.1)
    slurm.run("scancel", "--signal=TERM", job)  # to the workers, as before the end of the time
    found = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout=200)
    output = (tmp_path / "its output").read_text()
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), output
    assert output.count("resumed from") == 1 and json.loads(summary.read_text())["steps"] < 4000, output


def test_a_cancelled_job_stays_so(slurm, submit, small_run, tmp_path):
    job = submit(*small_run, "wait", "0")
    _wait_for_output(tmp_path / "its output", 2)
    slurm.run("scancel", job)
    deadline = time.monotonic() + 60
    while slurm.run("squeue", "-h", f"--jobs={job}").stdout.strip():
        assert time.monotonic() < deadline, slurm.job(job)
        time.sleep(0.2)
    found = slurm.job(job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0"), found
