"""`tfdist verify`, as a user runs it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tfdist.diagnostics import verify


def _verify(*arguments, timeout=280):
    command = [sys.executable, "-m", "tfdist.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_mirrored_on_four_replicas_equals_one_device(tmp_path):
    report = tmp_path / "report.json"
    found = _verify("--strategies=mirrored", "--devices=4", "--cases=plain,partial", f"--json={report}")
    assert found.returncode == 0, found.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["loop"], row["case"], row["replicas"]) for row in rows] == [
        ("fit", "plain", 4),
        ("fit", "partial", 4),
        ("custom", "plain", 4),
        ("custom", "partial", 4),
    ]
    assert all(row["ok"] and row["difference"] <= row["bound"] == 1e-4 for row in rows)
    assert found.stdout.splitlines()[-1] == "all 4 equal stock Keras on one device within their bounds"


def test_a_planted_fault_is_found_and_named():
    found = _verify("--strategies=one_device", "--loops=fit", "--cases=plain,clip", "--perturb=clip:0.001")
    assert found.returncode == 1, found.stderr
    plain, clip, verdict = found.stdout.splitlines()[1:]
    assert plain.split()[-1] == "ok"
    assert "clip" in clip and clip.endswith("EXCEEDED by weights 00")
    assert verdict == "1 of 2 differ from one device by more than their bound"


def test_a_strategy_that_does_not_end_is_named_and_ended():
    found = _verify("--strategies=one_device", "--loops=fit", "--cases=plain", "--timeout=1")
    assert found.returncode == 1
    assert "stock did not end within 1 s (--timeout)" in found.stderr


def test_a_strategy_that_fails_is_reported_with_its_own_words():
    found = _verify("--strategies=mirrored", "--devices=100000", "--loops=fit", "--cases=plain")
    assert found.returncode == 1
    assert "mirrored failed with exit code" in found.stderr
    assert "num_devices=100000: at most 256 logical CPU devices can be made" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategies=mirored"], "--strategies=mirored: 'mirored' is none of one_device, mirrored, multi_worker"),
        (["--cases=plain,nothing"], "'nothing' is none of plain, clip"),
        (["--loops="], "--loops=: name at least one of fit, custom"),
        (["--workers=1"], "--workers=1: a number of at least 2 is needed"),
        (["--perturb=plain"], "--perturb=plain: give CASE:SIZE"),
        (["--json=/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--case=plain"], "unrecognized arguments: --case=plain"),
        (["--devices=two"], "invalid int value: 'two'"),
    ],
    ids=str,
)
def test_wrong_use(arguments, words):
    with pytest.raises(verify.UsageError) as error:
        verify.main(arguments)
    assert words in str(error.value)


def test_difference_is_relative_to_the_largest_magnitude():
    assert verify.difference(np.array([100.0, 0.01]), np.array([100.0, 0.0])) == pytest.approx(1e-4)
    assert verify.difference(np.zeros(2), np.zeros(2)) == 0
    assert verify.difference(np.zeros(2), np.zeros(3)) == np.inf
    assert not verify.Row("mirrored", 2, "fit", "plain", float("nan"), "weights", 1e-4).ok


@pytest.mark.slow
def test_everything_equals_one_device(tmp_path):
    report = tmp_path / "report.json"
    found = _verify(f"--json={report}")
    assert found.returncode == 0, found.stdout + found.stderr
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == len(verify.STRATEGIES) * len(verify.LOOPS) * len(verify.BOUNDS)
