"""`tfdist env`, as a user runs it."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

from tfdist.diagnostics import env
from tfdist.errors import UsageError

_TWO = '{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, "task": {"type": "worker", "index": 1}}'


def test_versions_devices_and_job_are_told_and_secrets_are_not(tmp_path):
    variables = {
        "TF_CONFIG": _TWO,
        "SLURM_JOB_ID": "17",
        "SLURM_JWT": "hidden-1",
        "NCCL_DEBUG": "a|b\nc",
        "TFDIST_PROXY": "http://me:hidden-2@host/",
        "TFDIST_MONITOR": "10.0.0.1:4321/hidden-5",
        "NCCL_my_token": "hidden-6",
        "TF_VAR_password": "hidden-3",
        "AWS_SECRET_ACCESS_KEY": "hidden-4",
    }
    command = [sys.executable, "-m", "tfdist.cli", "env", f"--json={tmp_path / 'env.json'}"]
    found = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[:2] == ["| what | found |", "|---|---|"]
    rows = dict(line.strip("| ").split(" | ", 1) for line in lines[2:])
    assert rows["TensorFlow"] == version("tensorflow") and rows["Keras"] == version("keras")
    assert rows["Python"].startswith(platform.python_version())
    assert rows["GPUs that TensorFlow sees"] == "none"  # the tests hide them
    assert rows["cluster"].startswith("TF_CONFIG: worker 1 of 2 (10.0.0.1:1234, 10.0.0.2:1234)")
    assert rows["`TF_CONFIG`"] == _TWO and rows["`SLURM_JOB_ID`"] == "17"
    assert rows["`NCCL_DEBUG`"] == "a\\|b<br>c"  # a table still
    assert rows["`SLURM_JWT`"] == "(not shown)" and rows["`TFDIST_PROXY`"] == "http://...@host/"
    assert rows["`TFDIST_MONITOR`"] == "10.0.0.1:4321/..." and rows["`NCCL_my_token`"] == "(not shown)"
    text = found.stdout + (tmp_path / "env.json").read_text()
    assert "hidden" not in text and "AWS" not in text and "TF_VAR" not in text and "HOME" not in text
    assert "Traceback" not in found.stdout + found.stderr
    data = json.loads((tmp_path / "env.json").read_text())
    assert data["TensorFlow"] == version("tensorflow") and data["variables"]["SLURM_JOB_ID"] == "17"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "none: one worker on this machine"),
        ({"TF_CONFIG": "{"}, "error: TF_CONFIG='{': this is not JSON"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "error: Slurm: SLURM_STEP_NODELIST is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "MPI: 4 processes"),
        ({"PMI_RANK": "5", "PMI_SIZE": "2"}, "error: MPI: PMI_RANK='5' and PMI_SIZE='2': a rank from 0"),
    ],
    ids=str,
)
def test_the_job_is_told_or_what_is_wrong_with_it(environ, said):
    assert env.describe(environ)["cluster"].startswith(said)


def test_a_missing_program_is_said_on_its_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = env.describe({})
    assert found["GPUs that the driver lists"] == found["driver"] == "no nvidia-smi that answers"


def test_a_program_that_fails_is_said_on_its_line(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert env.describe({})["driver"] == "no nvidia-smi that answers"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json=/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--jso=x"], "unrecognized arguments"),
        (["more"], "unrecognized arguments: more"),
    ],
    ids=str,
)
def test_wrong_use(arguments, words):
    with pytest.raises(UsageError) as error:
        env.main(arguments)
    assert words in str(error.value)
