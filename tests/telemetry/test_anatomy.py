"""The parts of a step: against hand-made reports, an outer clock, and planted delays."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist.telemetry.anatomy import StepParts, begin_times, dissect, interval_times
from tfdist.training.report import StepReport
from tfdist.training.stamps import held, stamp


def report(**options):
    return StepReport(**{"step": 1, "num_steps": 1, "seconds": 0.0, "examples": None, **options})


def test_by_hand():
    """Two steps in a call, two replicas with two aggregations each."""
    times = dissect(
        report(
            num_steps=2,
            began=9.0,
            ended=30.0,
            begins=np.array([[10.0, 11.0], [20.0, 20.5]]),
            intervals=np.array(
                [[[14.0, 15.0, 16.0, 18.0], [13.0, 15.0, 16.0, 18.0]], [[24.0, 26.0, 24.0, 26.0]] * 2],
            ),
        ),
        previous_end=5.0,
        away=2.0,
        agreeing=0.5,
    )
    np.testing.assert_allclose(times.overhead, [2.5, 0.0])
    np.testing.assert_allclose(times.input, [1.0, 0.5])
    np.testing.assert_allclose(times.communication, [3.5 + 0.5, 4.0])
    np.testing.assert_allclose(times.compute, [9.0 - 3.5, 9.5 - 4.0 - 0.0], atol=0.51)
    np.testing.assert_allclose(times.ready, [[3.0, 2.0], [3.5, 3.5]])
    np.testing.assert_allclose(times.begins, [10.0, 20.0])
    np.testing.assert_allclose(times.ends, [20.0, 30.0])


def test_a_batch_fetched_outside_of_the_call():
    times = dissect(report(began=1.0, input_there=1.5, ended=3.0, intervals=np.array([[2.0, 2.25]])), 0.5)
    assert (times.overhead[0], times.input[0], times.communication[0]) == (0.5, 0.5, 0.25)
    assert times.total[0] == 2.5


@given(
    gaps=st.lists(st.floats(0, 1), min_size=5, max_size=60).filter(lambda g: len(g) % 5 == 0),
    away=st.floats(0, 0.2),
)
def test_the_parts_add_up_whatever_the_stamps_are(gaps, away):
    moments = 100 + np.cumsum(gaps).reshape(-1, 5)
    steps = len(moments)
    times = dissect(
        report(
            num_steps=steps,
            began=moments[0, 0],
            ended=moments[-1, 4],
            begins=moments[:, :2],
            intervals=moments[:, 2:4].reshape(steps, 1, 2),
        ),
        previous_end=moments[0, 0] - 0.5,
        away=away,
    )
    np.testing.assert_allclose(times.total.sum(), moments[-1, 4] - moments[0, 0] + 0.5 - away, atol=1e-6)


def watched(model, **fit):
    reports = []
    runner = model.fit.__self__.runner
    runner.watch(reports.append)
    model.fit(verbose=0, shuffle=False, **fit)
    runner.unwatch(reports.append)
    return [r for r in reports if isinstance(r, StepReport)]


@pytest.mark.parametrize("strategy", ["one_device", "mirrored2"])
@pytest.mark.parametrize("spe", [1, 4])
def test_the_parts_add_up_to_what_an_outer_clock_sees(build, arrays, strategy, spe):
    model = build(strategy, spe=spe, width=64)
    ends = []

    class Clock(keras.callbacks.Callback):
        same_on_all = True

        def on_train_batch_end(self, batch, logs=None):
            ends.append(time.time())

    reports = watched(model, x=arrays[0], y=arrays[1], batch_size=4, epochs=12, callbacks=[Clock()])
    timed = list(zip(reports, [None, *(r.ended for r in reports)], strict=False))[2:]
    total = StepParts.joined([dissect(r, before) for r, before in timed]).total.sum()
    np.testing.assert_allclose(total, ends[-1] - ends[1], rtol=0.03)
    replicas = 2 if strategy == "mirrored2" else 1
    assert interval_times(reports[-1]).shape == (reports[-1].num_steps, replicas, 1, 2)
    for r in reports:
        moments = np.concatenate([begin_times(r), interval_times(r)[:, 0, 0]], axis=1)
        assert (np.diff(moments.reshape(-1)) >= 0).all() and r.began <= moments[0, 0] and moments[-1, -1] <= r.ended


def test_a_slow_pipeline_is_input(build):
    def late():
        for _ in range(12):
            time.sleep(0.02)
            yield np.zeros((4, 6), "float32"), np.zeros((4, 2), "float32")

    spec = (tf.TensorSpec((4, 6)), tf.TensorSpec((4, 2)))
    data = tf.data.Dataset.from_generator(late, output_signature=spec)
    reports = watched(build(), x=data)
    times = StepParts.joined([dissect(r, before.ended) for before, r in zip(reports[3:], reports[4:], strict=False)])
    assert np.median(times.total) == pytest.approx(0.02, rel=0.2)
    assert np.median(times.input) > 0.8 * np.median(times.total)


def test_what_a_hook_takes_is_communication(build, arrays):
    """A hook that takes 15 ms between the gradients and their sum."""

    class Slow(tfdist.hooks.Hook):
        name = "slow"

        def aggregate(self, gradients, variables):
            def pause(*values):
                time.sleep(0.015)
                return values

            values = tf.numpy_function(pause, gradients, [g.dtype for g in gradients])
            return [tf.ensure_shape(value, g.shape) for value, g in zip(values, gradients, strict=True)]

    reports = watched(build(hook=Slow()), x=arrays[0], y=arrays[1], batch_size=4)
    times = StepParts.joined([dissect(r, r.began) for r in reports[2:]])
    assert np.median(times.communication) == pytest.approx(0.015, rel=0.2)
    assert np.median(times.compute) < 0.005


def test_local_sgd_sends_after_the_update(build, arrays):
    reports = watched(build("mirrored2", hook="local_sgd:period=2"), x=arrays[0], y=arrays[1], batch_size=4)
    intervals = interval_times(reports[-1])
    assert intervals.shape == (1, 2, 2, 2)
    assert (intervals[..., 1] >= intervals[..., 0]).all()


def test_every_optimizer_of_an_own_train_step_counts(build, arrays):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            x, y = data
            for _ in range(3):
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean((self(x) - y) ** 2)
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    reports = watched(build("mirrored2", model=Own), x=arrays[0], y=arrays[1], batch_size=4)
    assert interval_times(reports[-1]).shape == (1, 2, 3, 2)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored2"])
@pytest.mark.parametrize(("spe", "hook"), [(1, None), (4, "powersgd:rank=1"), (1, "local_sgd:period=2")])
def test_time_stamps_do_not_change_a_bit(build, arrays, strategy, spe, hook, tmp_path):
    weights = []
    for callbacks in ([], [tfdist.ScalingCallback(tmp_path)]):
        model = build(strategy, spe=spe, hook=hook)
        model.fit(*arrays, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_stamps_wait_for_what_they_are_given():
    """What the stamps rely on: an operation with control inputs reads the clock after them, at each run."""

    @tf.function(autograph=False)
    def run():
        before = stamp(())
        with tf.control_dependencies([before]):
            slow = tf.numpy_function(lambda: (time.sleep(0.05), np.float32(1))[1], [], tf.float32)
        after = stamp(slow)
        return before, held(slow, [after]), after

    for _ in range(2):
        start = time.time()
        before, value, after = run()
        assert start <= before <= after <= time.time() and after - before >= 0.05 and value == 1
