"""`ScalingCallback`: what it writes, read with TensorBoard's own tools, and what it refuses."""

import json
import os
import signal
import time

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util.tensor_util import make_ndarray

import tfdist
from tfdist.data import ArraySource
from tfdist.telemetry.record import read_record, require_readable_events
from tfdist.training.checkpoint import newest_checkpoint
from tfdist.training.save_callback import SaveCheckpoints

TAGS = {
    "scaling/examples_per_second",
    "scaling/examples_per_second_per_replica",
    "scaling/efficiency",
    "scaling/goodput",
    "step/time_ms",
    "step/p95_ms",
    "time/input_ms",
    "time/compute_ms",
    "time/communication_ms",
    "time/overhead_ms",
    "memory/peak_mb",
}
COMMUNICATION = {"comm/bytes_per_step", "comm/compression_ratio", "comm/bus_bandwidth_gbps"}


def events(folder):
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    found.Reload()
    return found


def last(found, tag):
    return make_ndarray(found.Tensors(tag)[-1].tensor_proto).item()


def test_fit(build, arrays, tmp_path):
    model = build("mirrored2")
    callback = tfdist.ScalingCallback(tmp_path, every=5, trace_steps=(11, 15), hparams={"width": 8})
    model.fit(*arrays, batch_size=4, epochs=4, verbose=0, validation_data=arrays, callbacks=[callback])
    found = events(tmp_path)
    tags = set(found.Tags()["tensors"])
    assert tags >= TAGS | COMMUNICATION
    steps = [event.step for event in found.Tensors("step/time_ms")]
    assert steps == list(range(5, 41, 5))
    assert b"width" in found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    layout = layout_pb2.Layout.FromString(found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in layout.category][:2] == ["Scaling", "Step"]
    record = read_record(tmp_path)
    assert record.finished and record.steps == 39 and record.num_replicas == 2 and record.global_batch_size == 4
    assert record.model["parameters"] == 6 * 8 + 8 + 8 * 2 + 2
    assert record.bytes_per_step == 4 * record.model["parameters"]  # 2 (n - 1) / n times the gradients
    assert record.flops_per_example == 3 * 2 * (6 * 8 + 8 * 2)
    assert record.lost_seconds["evaluation"] > 0 and 0 < record.goodput < 1
    assert len(record.workers[0].ready_ms) == 2
    assert record.workers[0].step_ms == pytest.approx(record.step_ms["mean"], rel=1e-6)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in trace if e["name"].startswith("step ")] == [f"step {i}" for i in range(11, 15)]
    assert {e["args"]["name"] for e in trace if e["name"] == "thread_name"} == {"worker 0"}
    whole = [e for e in trace if e["name"].startswith("step ")]
    parts = [e for e in trace if e["ph"] == "X" and not e["name"].startswith("step ")]
    assert sum(e["dur"] for e in parts) == pytest.approx(sum(e["dur"] for e in whole), rel=0.01)


def test_loop(strategies, arrays, tmp_path):
    with strategies["one_device"].scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    loop = tfdist.TrainLoop(model, loss="mse", optimizer="sgd", steps_per_loop=5)
    states = []
    source = ArraySource(arrays, batch_size=8)
    callback = tfdist.ScalingCallback(tmp_path, peak_tflops=1e-3, baseline_examples_per_second=100.0)
    loop.run(source, steps=100, callbacks=[states.append, callback])
    assert len(states) == 20
    record = read_record(tmp_path)
    assert record.steps == 95 and record.num_workers == 1 and not record.link
    assert record.mfu == pytest.approx(record.flops_per_example * record.examples_per_second / 1e9, rel=1e-6)
    found = events(tmp_path)
    per_second = last(found, "scaling/examples_per_second")
    assert last(found, "scaling/efficiency") == pytest.approx(per_second / 100, rel=1e-4)
    loop.run(source, steps=10, callbacks=[tfdist.ScalingCallback(tmp_path)])
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["tfdist-run-1.json", "tfdist-run.json"]


def test_the_profiler_runs_over_the_same_steps(build, arrays, tmp_path):
    callback = tfdist.ScalingCallback(tmp_path, trace_steps=(3, 6), profile=True)
    build().fit(*arrays, batch_size=4, verbose=0, callbacks=[callback])
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1
    assert (tmp_path / "trace.json").exists()


def test_a_training_that_fails_is_watched_no_longer(build, arrays, tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("planted")

    model = build()
    with pytest.raises(RuntimeError, match="planted"):
        callbacks = [tfdist.ScalingCallback(tmp_path, every=2), Fails()]
        model.fit(*arrays, batch_size=4, verbose=0, callbacks=callbacks)
    record = read_record(tmp_path)
    assert not record.finished and record.steps == 9
    model.fit(*arrays, batch_size=4, verbose=0)
    assert read_record(tmp_path) == record


def test_a_training_of_one_call_is_recorded_all_the_same(build, arrays, tmp_path):
    model = build(spe=10)
    model.fit(*arrays, batch_size=4, verbose=0, callbacks=[tfdist.ScalingCallback(tmp_path)])
    assert read_record(tmp_path).steps == 10


def test_tokens(strategies, tmp_path):
    with strategies["one_device"].scope():
        layers = [keras.layers.Embedding(5, 4), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((7,), dtype="int32"), *layers])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tfdist.prepare(model)
    x = np.random.default_rng(0).integers(5, size=(64, 7))
    model.fit(x, x, batch_size=2, verbose=0, callbacks=[tfdist.ScalingCallback(tmp_path)])
    found = events(tmp_path)
    examples, tokens = (last(found, f"scaling/{name}_per_second") for name in ("examples", "tokens"))
    assert tokens == pytest.approx(7 * examples)


def test_flops_of_convolutions(strategies):
    from tfdist.telemetry.flops import flops_per_example

    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(5, 3, padding="same"),
            keras.layers.DepthwiseConv2D(3, padding="valid"),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    forward = 2 * (8 * 8 * 5 * 9 * 3 + 6 * 6 * 5 * 9 + 180 * 2)
    assert flops_per_example(model) == 3 * forward


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"every": 0}, "every=0"),
        ({"trace_steps": (5, 5)}, r"trace_steps=\(5, 5\)"),
        ({"trace_steps": (0, 5)}, "trace_steps"),
        ({"trace_steps": "5:9"}, "trace_steps"),
        ({"profile": True}, "profile=True"),
        ({"peak_tflops": -1}, "peak_tflops=-1"),
        ({"log_dir": ""}, "log_dir=''"),
        ({"log_dir": __file__}, "log_dir="),
    ],
)
def test_wrong_arguments(options, named):
    with pytest.raises(tfdist.UsageError, match=named):
        tfdist.ScalingCallback(**{"log_dir": "unused", **options})
    assert not os.path.exists("unused")


def test_a_model_that_is_not_prepared(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tfdist.UsageError, match="prepare"):
        model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0, callbacks=[tfdist.ScalingCallback(tmp_path)])


def test_records_that_are_none(build, arrays, tmp_path):
    with pytest.raises(tfdist.UsageError, match="no such folder"):
        read_record(tmp_path / "missing")
    with pytest.raises(tfdist.UsageError, match="no event file either"):
        read_record(tmp_path)
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"something")
    with pytest.raises(tfdist.UsageError, match="was not written by it"):
        read_record(tmp_path)
    for text in ("{", "[]", '{"format": 9}', '{"format": 1}'):
        (tmp_path / "tfdist-run.json").write_text(text)
        with pytest.raises(tfdist.UsageError, match="is no record of a run"):
            read_record(tmp_path)


def test_damaged_event_files(build, arrays, tmp_path):
    build().fit(*arrays, batch_size=4, verbose=0, callbacks=[tfdist.ScalingCallback(tmp_path)])
    require_readable_events(tmp_path)
    path = next(tmp_path.glob("*tfevents*"))
    whole = path.read_bytes()
    for damaged in (whole[:-7], whole[:40] + b"x" + whole[41:], b"no events at all, but a text"):
        path.write_bytes(damaged)
        with pytest.raises(tfdist.UsageError, match=path.name):
            require_readable_events(tmp_path)


def test_a_job_that_is_asked_to_stop_writes_its_last_figures(strategies, tmp_path):
    """SIGTERM after the third step of nine: the record says so, and the process would end with 75."""
    strategy = strategies["one_device"]
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    class Terminates(keras.callbacks.Callback):
        same_on_all = True

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)  # a thread of its own sees the signal; one step more would do no harm but to this test

    tfdist.prepare(model)
    callbacks = [SaveCheckpoints(tmp_path / "ck"), tfdist.ScalingCallback(tmp_path / "log"), Terminates()]
    x = np.zeros((36, 4), "float32")
    with pytest.raises(SystemExit) as ended:
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert read_record(tmp_path / "log").steps >= 1 and newest_checkpoint(tmp_path / "ck").step == 3
    # Who catches that, in a notebook, trains on.
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=callbacks[:1])
    assert newest_checkpoint(tmp_path / "ck").step == 9
