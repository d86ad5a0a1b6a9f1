"""Losses: shares of the global batch, never 1/N, for every way in which a loss can be reduced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def _data(rows, seed=0, inputs=6, outputs=2):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, inputs)).astype("float32"), 3 * rng.normal(size=(rows, outputs)).astype("float32")


def _dense(loss="mse", optimizer=None, outputs=2, **compile_options):
    def build():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(outputs)]
        )
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), loss, **compile_options)
        return model

    return build


def _fit(x, y, batch, epochs=2, **options):
    return lambda model: model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options)


def test_partial_batches(parity):
    x, y = _data(13)
    parity.check(_dense(metrics=["mae"]), _fit(x, y, 5))


def test_replicas_without_examples(parity):
    x, y = _data(10)
    parity.check(_dense(metrics=["mae"]), _fit(x, y, 4))


def scalar_mean(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


@pytest.mark.parametrize("rows", [12, 13])
def test_loss_that_returns_a_scalar_mean(parity, rows):
    x, y = _data(rows)
    parity.check(_dense(scalar_mean), _fit(x, y, 4))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(parity, reduction, weighted):
    if reduction == "none" and not weighted:
        pytest.skip("stock Keras fails on a loss without reduction when batches differ in size (one AddN)")
    x, y = _data(13)
    weights = np.linspace(0, 3, 13, dtype="float32") if weighted else None
    if reduction == "none":
        x, y, weights = x[:12], y[:12], weights[:12]
    build = _dense(keras.losses.MeanSquaredError(reduction=reduction), lambda: keras.optimizers.SGD(0.01))
    on = ("one_device", "mirrored2") if reduction == "none" else ("mirrored2", "mirrored4")
    parity.check(build, _fit(x, y, 4 if reduction == "none" else 5, sample_weight=weights), on=on)


def test_class_weight(parity):
    x, _ = _data(13)
    labels = np.arange(13) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    build = _dense(loss, outputs=3, metrics=["accuracy"], weighted_metrics=["accuracy"])
    parity.check(build, _fit(x, labels, 5, class_weight={0: 0.5, 1: 2.0, 2: 3.0}))


def _masked_model():
    tokens = keras.Input((8,), dtype="int32")
    states = keras.layers.Embedding(20, 6, mask_zero=True)(tokens)
    model = keras.Model(tokens, keras.layers.Dense(20)(states))
    model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _unequal_tokens(rows=6):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, size=(rows, 8)).astype("int32")
    tokens[rows // 2 :, 1:] = 0  # the second replica has far fewer valid tokens
    return tokens, rng.integers(0, 20, size=(rows, 8)).astype("int32")


@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_masked_tokens_are_averaged_over_the_whole_batch(parity, accumulate_steps):
    x, y = _unequal_tokens(7)
    parity.check(_masked_model, _fit(x, y, 6), on=("mirrored2", "mirrored4"), accumulate_steps=accumulate_steps)


def test_masks_with_sample_weights_and_a_regularizer(parity):
    def build():
        tokens = keras.Input((8,), dtype="int32")
        states = keras.layers.Embedding(20, 6, mask_zero=True, embeddings_regularizer="l2")(tokens)
        outputs = [keras.layers.Dense(20, name="a")(states), keras.layers.Dense(20, name="b")(states)]
        model = keras.Model(tokens, outputs)
        losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in outputs]
        model.compile(keras.optimizers.SGD(0.5), losses, loss_weights=[1.0, 0.3])
        return model

    x, y = _unequal_tokens(7)
    weights = np.linspace(0.5, 2, 56, dtype="float32").reshape(7, 8)
    for steps in (1, 2):
        parity.check(
            build, _fit(x, [y, y[::-1]], 6, sample_weight=[weights, weights]), on=("mirrored2",), accumulate_steps=steps
        )


def test_regularizers_and_added_losses(parity):
    class AddsLoss(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.abs(x)))
            return x

    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"),
                AddsLoss(),
                keras.layers.Dense(2, activity_regularizer=keras.regularizers.L2(0.02)),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    x, y = _data(13)
    for steps in (1, 2):
        parity.check(build, _fit(x, y, 5), accumulate_steps=steps)


def test_overridden_compute_loss(parity):
    class Model(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * tf.reduce_mean(tf.abs(y_pred))

    def build():
        model = Model([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = _data(13)
    parity.check(build, _fit(x, y, 5))


def test_several_outputs_with_loss_weights(parity):
    def build():
        inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
        joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        outputs = {"p": keras.layers.Dense(2, name="p")(joined), "q": keras.layers.Dense(1, name="q")(joined)}
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.05),
            {"p": "mse", "q": "mae"},
            loss_weights={"p": 0.5, "q": 2.0},
            metrics={"p": ["mae"]},
        )
        return model

    x, y = _data(13)
    parity.check(build, _fit({"a": x, "b": -x}, {"p": y, "q": y[:, :1]}, 5))


def test_pair_of_sum_and_count(parity, strategies):
    import tfdist

    def pair(y_true, y_pred):
        losses = tf.square(y_true - y_pred)
        counts = tf.cast(y_true > 0, losses.dtype)
        return tf.reduce_sum(losses * counts), tf.reduce_sum(counts)

    x, y = _data(13)
    results = []
    for name in ("one_device", "mirrored2", "mirrored4"):
        for steps in (1, 2):
            with strategies[name].scope():
                keras.utils.set_random_seed(1)
                model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            loop = tfdist.TrainLoop(
                model, loss=pair, optimizer=keras.optimizers.SGD(0.1), accumulate_steps=steps, steps_per_loop=2
            )
            source = tfdist.data.ArraySource((x, y), batch_size=5, shuffle=False)
            logs = loop.run(source, steps=3)
            results.append((model.get_weights(), logs["loss"]))
    # By hand: three steps of gradient descent on sum / count.
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    kernel, bias = model.get_weights()
    total, rows = 0.0, 0
    for start in (0, 5, 10):
        xb, yb = x[start : start + 5], y[start : start + 5]
        error = xb @ kernel + bias - yb
        chosen = yb > 0
        gradient = 2 * error * chosen / chosen.sum()
        total += (error**2 * chosen).sum() / chosen.sum() * len(xb)
        rows += len(xb)
        kernel, bias = kernel - 0.1 * xb.T @ gradient, bias - 0.1 * gradient.sum(axis=0)
    for (found_kernel, found_bias), loss in results:
        np.testing.assert_allclose(found_kernel, kernel, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found_bias, bias, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(loss, total / rows, rtol=1e-4)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(3, 17),
    batch=st.integers(2, 9),
    name=st.sampled_from(["mirrored2", "mirrored3", "mirrored4"]),
    loss=st.sampled_from(["mse", "mae", scalar_mean]),
    weighted=st.booleans(),
    steps=st.sampled_from([1, 2, 3]),
)
def test_any_split_equals_one_device(parity, rows, batch, name, loss, weighted, steps):
    x, y = _data(rows)
    weights = np.linspace(0.1, 2, rows, dtype="float32") if weighted and loss != scalar_mean else None
    parity.check(
        _dense(loss, metrics=["mae"]), _fit(x, y, batch, 1, sample_weight=weights), on=(name,), accumulate_steps=steps
    )
