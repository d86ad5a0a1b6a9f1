"""Runs the project's scripts as a user does: in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., dict]:
    """Runs `scripts/train.py`, with `workers` under `tfdist launch`; returns its summary and what it printed."""

    def run(*args: str, workers: int = 1, mpi: bool = False, code: int = 0, timeout: float = 120, **env: str) -> dict:
        summary = tmp_path / "summary.json"
        launcher = ["-m", "tfdist.cli", "launch", f"--workers={workers}", *["--mpi"] * mpi] if workers > 1 else []
        done = subprocess.run(
            [sys.executable, *launcher, str(ROOT / "scripts" / "train.py"), f"--summary_json={summary}", *args],
            cwd=tmp_path,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(summary.read_text()) if code == 0 else {}
        return {**found, "stdout": done.stdout, "stderr": done.stderr}

    return run
