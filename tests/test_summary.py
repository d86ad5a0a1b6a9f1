"""The figures of a run: the file, the digest of the weights, the times of steps."""

import dataclasses
import json
import os

import pytest

from tfdist import summary
from tfdist.errors import SaveError
from tfdist.summary import StepTimes, Summary, weights_sha256

_SUMMARY = Summary(
    strategy="mirrored",
    num_workers=1,
    num_replicas=2,
    global_batch_size=8,
    hook="allreduce",
    transport="collective",
    steps=3,
    examples_per_second=100.5,
    step_time_ms={"median": 1.0, "p95": 2.0},
    first_loss=2.0,
    final_loss=float("nan"),
    final_metrics={"accuracy": 0.5, "test_loss": float("inf")},
    weights_sha256="ab",
    restarts=0,
    peak_memory_mb=10.0,
)


def test_file_has_the_fields_and_is_strict_json(tmp_path):
    path = tmp_path / "new" / "summary.json"
    _SUMMARY.write(path)
    found = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert found == {
        **dataclasses.asdict(_SUMMARY),
        "final_loss": None,
        "final_metrics": {"accuracy": 0.5, "test_loss": None},
    }
    assert list(found) == [field.name for field in dataclasses.fields(Summary)]
    assert path.stat().st_mode & 0o777 == 0o644


def test_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SaveError, match='(?s)summary.json: disk full. They are:.*"steps": 3'):
        _SUMMARY.write(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["summary.json"]
    monkeypatch.undo()
    _SUMMARY.write(path)
    assert json.loads(path.read_text())["steps"] == 3 and os.listdir(tmp_path) == ["summary.json"]


def _model(devices=None, scale=1.0, name="dense"):
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(devices) if devices else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, name=name), keras.layers.BatchNormalization()]
        )
        model.layers[0].kernel.assign(scale * keras.ops.ones((3, 2)))
    return model


def test_digest_tells_weights_apart_and_nothing_else(cpu_devices):
    import keras

    keras.utils.clear_session()
    first = _model()
    digest = weights_sha256(first)
    assert len(digest) == 64
    keras.utils.clear_session()
    second = _model()
    second.compile("adam", "mse")  # has state, which does not count
    assert weights_sha256(second) == digest
    keras.utils.clear_session()
    assert weights_sha256(_model(["CPU:0", "CPU:1"])) == digest
    keras.utils.clear_session()
    assert weights_sha256(_model(scale=1.0000001)) != digest
    keras.utils.clear_session()
    assert weights_sha256(_model(name="other")) != digest
    first.layers[1].moving_mean.assign([0.0, 1e-20])
    assert weights_sha256(first) != digest


@dataclasses.dataclass(frozen=True)
class _Report:
    num_steps: int
    seconds: float


def test_times_leave_out_the_first_call():
    times = StepTimes()
    assert times.step_time_ms() is None and times.examples_per_second(8) is None
    times(_Report(1, 60.0))
    assert times.step_time_ms() == {"median": 60_000.0, "p95": 60_000.0}
    assert times.examples_per_second(30) == 0.5
    for _ in range(18):
        times(_Report(5, 0.5))
    times(_Report(10, 10.0))
    assert times.steps == 101
    assert times.step_time_ms() == {"median": 100.0, "p95": pytest.approx(1000.0)}
    assert times.examples_per_second(19) == pytest.approx(100 * 19 / 19)


def test_times_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(summary, "_KEPT_CALLS", 5)
    times = StepTimes()
    for index in range(100):
        times(_Report(1, float(index)))
    assert len(times._last) == 5
    assert times.step_time_ms()["median"] == 97_000.0
    assert times.steps == 100


def test_peak_memory(cpu_devices):
    assert 50 < summary.peak_memory_mb() < 1e6
