"""`./scripts/quickstart.sh` in a fresh copy of the repository, with nothing but Python and a shell."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def clone(copy_of_repository: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without `.venv`."""
    return copy_of_repository(tmp_path_factory.mktemp("clone") / "tfdist")


def quickstart(clone: Path, *args: str) -> tuple[str, float]:
    start = time.monotonic()
    done = subprocess.run(
        ["./scripts/quickstart.sh", *args], cwd=clone, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_quickstart_from_nothing(clone):
    printed, first = quickstart(clone)
    accuracy = float(re.search(r"test accuracy: ([\d.]+)", printed).group(1))
    assert accuracy >= 0.97
    assert re.search(r"throughput: [\d,]+ examples/s", printed)
    assert "Epoch 20/20" in printed and printed.count("test accuracy:") == 1
    (run,) = (clone / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["strategy"], summary["num_workers"], summary["num_replicas"]) == ("multi_worker", 2, 2)
    checkpoint = re.search(r"checkpoint: (\S+)", printed).group(1)
    log = re.search(r"TensorBoard log: (\S+)", printed).group(1)
    assert (clone / checkpoint / "checkpoint.json").exists() and list((clone / log).rglob("events*"))

    printed, second = quickstart(clone, "--epochs=1")
    assert "installing" not in printed and "test accuracy" in printed
    assert second < first
    assert len(list((clone / "runs").iterdir())) == 2


def test_a_machine_without_python_is_told_what_it_needs(clone, tmp_path):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for script in ("quickstart.sh", "test.sh"):
        done = subprocess.run(
            [f"./scripts/{script}"],
            cwd=shutil.copytree(clone, tmp_path / script, ignore=shutil.ignore_patterns(".venv", "runs")),
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert "no Python from 3.10 to 3.13 found" in done.stderr
