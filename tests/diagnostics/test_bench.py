"""`tfdist bench`, as a user runs it."""

import json
import subprocess
import sys

import pytest

from tfdist.diagnostics import bench


def run(*arguments, timeout=200):
    command = [sys.executable, "-m", "tfdist.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_sizes_are_timed_and_sums_checked(tmp_path):
    found = run("--from=1k", "--to=1M", "--factor=32", "--rounds=3", f"--json={tmp_path / 'rows.json'}")
    assert found.returncode == 0, found.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["bytes"] for row in rows] == 2 * [1024, 32768, 1048576]
    assert [row["transport"] for row in rows] == 3 * ["collective"] + 3 * ["mpi"]
    for row in rows:
        assert row["wrong"] == 0 and row["workers"] == 2 and row["microseconds"] > 0
        assert row["algbw"] == pytest.approx(row["bytes"] / row["microseconds"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (n - 1) / n is 1 for two
    lines = found.stdout.splitlines()
    assert lines[1].split() == ["transport", "size", "time", "algbw", "busbw", "#wrong"] and len(lines) == 9


def test_bus_bandwidth_of_more_workers():
    row = bench.Row("collective", 8_000_000, 1000.0, 0, 4)
    assert (row.algbw, row.busbw) == (8.0, 12.0)


@pytest.mark.parametrize(("text", "size"), [("1024", 1024), ("64k", 65536), ("1MB", 2**20), ("2GiB", 2**31), ("7", 4)])
def test_sizes(text, size):
    assert bench._size("--from", text) == size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers=1"], "--workers=1: a number of at least 2"),
        (["--from=1x"], "--from=1x: a size of at least 4 bytes is needed"),
        (["--to=3"], "--to=3: a size of at least 4 bytes"),
        (["--from=2k", "--to=1k"], "--from=2k is larger than --to=1k"),
        (["--factor=1"], "--factor"),
        (["--rounds=0"], "--rounds=0"),
        (["--json=/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--transports=nccl"], "--transports=nccl: choose out of collective and mpi"),
        (["--size=3"], "unrecognized arguments"),
    ],
    ids=str,
)
def test_wrong_use(arguments, words):
    with pytest.raises(bench.UsageError) as error:
        bench.main(arguments)
    assert words in str(error.value)


def test_a_job_that_does_not_end_is_ended():
    found = run("--from=1k", "--to=1k", "--timeout=1")
    assert found.returncode == 1 and "did not end within 1 s" in found.stderr
