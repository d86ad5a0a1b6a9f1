"""A job of two workers that dies in the middle and is started again with the same folder."""

import ast
from pathlib import Path

import numpy as np
import pytest

from tests.multi_worker.harness import start_workers

WORKER = Path(__file__).with_name("restart_worker.py")


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a job of two workers; returns its exit code and what it printed."""
    folder.mkdir(exist_ok=True)
    with start_workers(2, [str(WORKER), arguments[0], str(folder), *arguments[1:]], folder / "log") as process:
        code = process.wait(120)
    return code, (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "die_at", "begins"), [("fit", "3", "epoch 3 begins"), ("loop", "18", "step 16 begins")]
)
def test_a_killed_job_goes_on_where_it_was(kind, die_at, begins, tmp_path):
    """Worker 1 dies as epoch 3 of 0 to 4 begins, or after step 18 of 25, where 16 was saved last."""
    code, printed = run(tmp_path / "broken", kind, die_at)
    assert code == 1, printed
    code, printed = run(tmp_path / "broken", kind)
    assert code == 0, printed
    lines = [line.partition("] ")[2] for line in printed.splitlines() if "begins" in line]
    assert lines.count(begins) == 2 and lines[0] == begins, printed
    code, printed = run(tmp_path / "unbroken", kind)
    assert code == 0, printed
    expected = ast.literal_eval((tmp_path / "unbroken" / "weights_0").read_text())
    for worker in (0, 1):
        found = ast.literal_eval((tmp_path / "broken" / f"weights_{worker}").read_text())
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
