"""`TrainLoop` on one device and on several: its numbers, callbacks, evaluation, and how often it traces."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.data import ArraySource
from tfdist.errors import UsageError


def data(rows=23, seed=4):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(3, size=rows).astype("int32")


def model_of(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])


def loop_of(strategy, **options):
    loss = options.pop("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return tfdist.TrainLoop(model_of(strategy), loss=loss, optimizer=keras.optimizers.Adam(0.02), **options)


def source(rows=23, **options):
    return ArraySource(data(rows), **{"batch_size": 5, "seed": 6, **options})


@pytest.mark.parametrize("name", ["one_device", "mirrored2", "mirrored3"])
@pytest.mark.parametrize("steps_per_loop", [1, 4, 16])
def test_the_loop_equals_stock_keras(strategies, name, steps_per_loop):
    """Three epochs of five steps, on the batches that the source gives; then an evaluation and its metrics."""
    stock = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    stock.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    loop = loop_of(strategies[name], steps_per_loop=steps_per_loop, metrics=["accuracy"])
    stock.set_weights(loop.model.get_weights())

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(5)
    logs = loop.run(batches, steps=15)
    history = stock.fit(batches, epochs=3, shuffle=False, verbose=0).history
    for a, b in zip(loop.model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert logs["loss"] == pytest.approx(np.mean(history["loss"]), rel=1e-4)

    found = loop.evaluate(data(21, seed=9))
    expected = stock.evaluate(*data(21, seed=9), verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-4)


def test_callbacks_see_the_logs_since_the_last_call(strategies):
    loop = loop_of(strategies["mirrored2"], steps_per_loop=2)
    seen = []
    loop.run(source(), steps=7, callbacks=[lambda state: seen.append(state)])
    assert [state.step for state in seen] == [2, 4, 5, 7]  # a call of the loop ends with its epoch
    assert [state.epoch for state in seen] == [0, 0, 0, 1]
    again = loop_of(strategies["mirrored2"])
    single = []
    again.run(source(), steps=7, callbacks=[lambda state: single.append(state.logs["loss"])])
    sizes = np.array([5, 5, 5, 5, 3, 5, 5])
    for state, steps in zip(seen, ([0, 1], [2, 3], [4], [5, 6]), strict=True):
        expected = np.average(np.array(single)[steps], weights=sizes[steps])
        assert state.logs["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_callback_that_returns_true_ends_the_run(strategies):
    loop = loop_of(strategies["one_device"])
    loop.run(source(), steps=100, callbacks=[lambda state: state.step == 3])
    assert loop.step == 3
    loop.run(source(), steps=4)
    assert loop.step == 7


def test_a_callback_that_raises_ends_the_run_and_another_can_follow(strategies):
    loop = loop_of(strategies["mirrored2"])

    def fail(state):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop.run(source(), steps=5, callbacks=[fail])
    assert loop.step == 1
    loop.run(source(), steps=2)
    assert loop.step == 3


def test_validation_at_its_steps(strategies):
    loop = loop_of(strategies["mirrored2"], steps_per_loop=8, metrics=["accuracy"])
    seen = []
    logs = loop.run(
        source(),
        steps=9,
        validation=source(11, shuffle=False),
        validate_every=4,
        callbacks=[lambda state: seen.append((state.step, dict(state.validation)))],
    )
    assert [step for step, values in seen if values] == [4, 8, 9]
    assert all(set(values) == {"loss", "accuracy"} for _, values in seen if values)
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(logs)
    assert logs["val_loss"] == pytest.approx(seen[-1][1]["loss"])


def test_two_runs_go_on_where_the_first_stopped(strategies):
    once, twice = (loop_of(strategies["one_device"]) for _ in range(2))
    once.run(source(), steps=12)
    train = source()
    twice.run(train, steps=3)
    twice.run(train, steps=9)
    for a, b in zip(once.model.get_weights(), twice.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["one_device", "mirrored2"])
@pytest.mark.parametrize("steps_per_loop", [1, 4])
def test_nothing_is_traced_after_the_first_epoch(strategies, name, steps_per_loop):
    loop = loop_of(strategies[name], steps_per_loop=steps_per_loop, metrics=["accuracy"])
    train, validation = source(), source(11, shuffle=False)

    def epoch():
        loop.run(train, steps=5, validation=validation, callbacks=[lambda state: None])
        return loop._runner.functions(None).trace_count

    first = epoch()
    assert first > 0
    assert [epoch() for _ in range(3)] == [first] * 3


@pytest.mark.parametrize("name", ["one_device", "mirrored2"])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_fit_traces_nothing_after_the_first_epoch(strategies, name, steps_per_execution):
    with strategies[name].scope():
        model = model_of(strategies[name])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, steps_per_execution=steps_per_execution)
    tfdist.prepare(model)
    x, y = data()
    counts = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: counts.append(model.fit.__self__.runner.functions(None).trace_count)
    )
    model.fit(x, y, batch_size=5, epochs=4, validation_data=(x, y), verbose=0, callbacks=[count])
    model.fit(x, y, batch_size=5, epochs=2, validation_data=(x, y), verbose=0, callbacks=[count])
    assert counts[0] > 0
    assert counts == [counts[0]] * 6


def test_step_reports_count_steps_and_examples(strategies):
    reports = []
    loop = loop_of(strategies["mirrored2"], steps_per_loop=2, step_listener=reports.append)
    loop.run(source(), steps=5)
    assert [(report.step, report.num_steps) for report in reports] == [(2, 2), (4, 2), (5, 1)]
    assert [report.examples for report in reports] == [10, 10, 5]
    assert all(report.seconds > 0 for report in reports)


def test_losses_by_name_and_as_functions_agree(strategies):
    def per_example(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def pair(y_true, y_pred):
        losses = per_example(y_true, y_pred)
        return tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype)

    def scalar(y_true, y_pred):
        return tf.reduce_mean(per_example(y_true, y_pred))

    results = []
    for loss in (keras.losses.SparseCategoricalCrossentropy(from_logits=True), per_example, pair, scalar):
        loop = loop_of(strategies["mirrored3"], loss=loss)
        logs = loop.run(source(), steps=7)
        results.append([*loop.model.get_weights(), np.array(logs["loss"])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": 1, "validate_every": 0}, "validate_every=0"),
        ({"steps": 1, "checkpoint_every": -1}, "checkpoint_every=-1"),
    ],
)
def test_wrong_numbers_of_steps(strategies, options, words):
    with pytest.raises(UsageError, match=words):
        loop_of(strategies["one_device"]).run(source(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps_per_loop": 0}, "steps_per_loop=0"),
        ({"accumulate_steps": 0}, "accumulate_steps=0"),
        ({"clip_global_norm": -1.0}, "clip_global_norm=-1.0"),
        ({"hook": "alreduce"}, "allreduce"),
        ({"hook": 3}, "hook"),
    ],
)
def test_wrong_options(strategies, options, words):
    with pytest.raises(UsageError, match=words):
        loop_of(strategies["one_device"], **options)


def test_what_is_no_model_or_no_data_is_refused(strategies):
    with pytest.raises(UsageError, match="no keras.Model"):
        tfdist.TrainLoop("model", loss="mse", optimizer="sgd")
    with pytest.raises(UsageError, match="the dataset is empty"):
        loop_of(strategies["one_device"]).run(tf.data.Dataset.from_tensor_slices(data()).take(0).batch(2), steps=1)
    nothing = tf.data.Dataset.from_tensor_slices(data()).filter(lambda x, y: x[0] > 1e9).batch(2)
    with pytest.raises(UsageError, match="gave no batch"):
        loop_of(strategies["one_device"]).run(nothing, steps=1)
    with pytest.raises(UsageError, match="gave no batch"):
        loop_of(strategies["one_device"]).evaluate(nothing)
