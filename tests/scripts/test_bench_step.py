"""The step benchmark: all rows come out, nothing is traced after the first epoch, and memory stays where it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {
    "telemetry": {"telemetry_mlp_mirrored", "telemetry_cnn_mirrored", "telemetry_transformer"},
    "one_device": {
        "fit_mlp_one_device",
        "fit_mlp_dataset_one_device",
        "fit_of_one_step_one_device",
        "fit_cnn_one_device",
        "fit_transformer_one_device",
    },
    "mirrored": {
        "fit_mlp_mirrored",
        "fit_mlp_mirrored_16_steps_per_call",
        "fit_of_one_step_mirrored",
        "fit_cnn_mirrored",
        "fit_transformer_mirrored",
        "loop_mlp_mirrored",
        "loop_cnn_mirrored",
    },
    "save": {"save_transformer"},
    "multi_worker": {"loop_mlp_multi_worker"},
}


def bench(tmp_path, *args, code=0):
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "scripts/bench_step.py", f"--json={out}", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stderr[-3000:]
    return (json.loads(out.read_text()) if out.exists() else []), done


@pytest.mark.slow
@pytest.mark.parametrize("group", PAIRS)
def test_every_row_is_measured(tmp_path, group):
    rows, done = bench(tmp_path, "--quick", f"--groups={group}")
    assert {row["name"] for row in rows} == PAIRS[group]
    for row in rows:
        assert row["ours_ms"] > 0 and row["name"] in done.stdout
        assert (row["other_ms"] is None) == (row["ratio"] is None)
        if row["ratio"] is not None:
            assert 0 < row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]


def test_two_thousand_steps_trace_nothing_and_keep_their_memory(tmp_path):
    (row,), done = bench(tmp_path, "--groups=endurance", "--strict")
    assert row["steps"] == 2000
    assert row["traces_after_first_epoch"] == 0
    assert row["memory_growth"] <= 0.05
    assert "met" in done.stdout


def test_an_unknown_group_is_exit_code_2(tmp_path):
    _, done = bench(tmp_path, "--groups=mirored", code=2)
    assert "--groups=mirored: choose out of one_device, mirrored" in done.stderr
