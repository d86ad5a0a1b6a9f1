"""Causes planted into a real training on real workers: each is named first, with its amount."""

import json
import sys
from pathlib import Path

import pytest

from scripts.bench.links import can_be_made
from tfdist.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


def sweep(out, *arguments, replicas="1,2", options=()):
    command = ["scale", f"--replicas={replicas}", "--modes=strong", f"--out={out}", *options]
    assert main([*command, "--", str(HERE / "planted_training.py"), *arguments]) == 0
    return json.loads((out / "report.json").read_text())


def first_cause(report):
    return report["modes"][0]["diagnoses"][-1]["causes"][0]


def compute_ms(report, worker):
    return report["modes"][0]["sizes"][-1]["workers"][worker]["compute_ms"]


def test_nothing_and_a_busy_core(tmp_path):
    nothing = sweep(tmp_path / "nothing", options=["--repeats=2"])
    assert nothing["headline"].startswith("scales well"), nothing["headline"]
    busy = sweep(tmp_path / "busy", "--plant=busy", options=["--repeats=1"])
    cause = first_cause(busy)
    assert cause["kind"] == "straggler" and cause["worker"] == 1 and "slower in compute" in cause["finding"]
    # What was planted: the same work on the same core takes so much longer than undisturbed.
    planted = compute_ms(busy, 1) - compute_ms(nothing, 1)
    assert cause["amount_ms"] == pytest.approx(planted, rel=0.2)
    assert cause["slowdown"] == pytest.approx(compute_ms(busy, 1) / compute_ms(nothing, 1), rel=0.2)
    assert cause["slowdown"] > 1.4


def test_a_pipeline_that_sleeps(tmp_path):
    report = sweep(tmp_path / "out", "--plant=input", "--global_batch_size=128", options=["--repeats=1"])
    cause = first_cause(report)
    assert cause["kind"] == "input" and cause["amount_ms"] == pytest.approx(20, rel=0.2)
    assert report["headline"].startswith("input-bound")


def test_a_callback_on_the_chief(tmp_path):
    cause = first_cause(sweep(tmp_path / "out", "--plant=serial", options=["--repeats=1"]))
    assert cause["kind"] == "serial" and cause["worker"] == 0 and cause["amount_ms"] == pytest.approx(60, rel=0.2)


@pytest.mark.skipif(not can_be_made(), reason="making network namespaces needs root and iproute2")
def test_a_slow_link(tmp_path):
    launcher = f"{sys.executable} {HERE / 'over_link.py'} {{replicas}}"
    report = sweep(tmp_path / "out", "--global_batch_size=512", options=["--repeats=1", f"--launcher={launcher}"])
    cause = first_cause(report)
    assert cause["kind"] == "communication" and "hook=powersgd would save" in cause["advice"]
    assert 8e-6 * report["link"]["beta_bytes_per_second"] == pytest.approx(100, rel=0.2)
    sent = report["modes"][0]["sizes"][-1]["runs"][0]["bytes_per_step"]
    assert cause["amount_ms"] == pytest.approx(1e3 * 8 * sent / 100e6, rel=0.2)


def test_four_replicas_are_predicted_from_three(tmp_path):
    report = sweep(tmp_path / "out", replicas="1,2,3,4", options=["--repeats=2", "--oversubscribe"])
    predicted = {p["replicas"]: p["step_ms"] for p in report["modes"][0]["hindsight"]}
    measured = {size["replicas"]: size["step_ms"] for size in report["modes"][0]["sizes"]}
    assert predicted[4] == pytest.approx(measured[4], rel=0.15)
