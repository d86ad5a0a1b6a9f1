"""Optimizers: what they clip, accumulate, average and skip is the aggregated gradient, as on one device."""

import inspect

import keras
import numpy as np
import pytest

import tfdist


def _data(rows, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, 6)).astype("float32"),
        (scale * rng.normal(size=(rows, 2))).astype("float32"),
    )


def _dense(optimizer, policy=None, **layer_options):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", dtype=policy, **layer_options),
                keras.layers.Dense(2, dtype=policy),
            ]
        )
        model.compile(optimizer(), "mse")
        return model

    return build


def _fit(x, y, batch, epochs=2):
    return lambda model: model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "muon": lambda: keras.optimizers.Muon(0.01, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 6)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(parity, name):
    if name == "muon" and "rms_rate" not in inspect.signature(keras.optimizers.Muon).parameters:
        pytest.skip("Muon of Keras 3.12 fails with TensorFlow's own variables, without tfdist too")
    parity.check(_dense(OPTIMIZERS[name]), _fit(*_data(13), 5), on=("mirrored2",))


def test_multi_optimizer(parity):
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip(f"Keras {keras.__version__} has no MultiOptimizer")

    def multi():
        kinds = {2: keras.optimizers.Adam(0.01, clipnorm=0.1), 1: keras.optimizers.SGD(0.05, momentum=0.9)}
        return keras.optimizers.MultiOptimizer(lambda variable: kinds[len(variable.shape)])

    parity.check(_dense(multi), _fit(*_data(13), 5), on=("one_device", "mirrored2"))


def test_constraints(parity):
    build = _dense(lambda: keras.optimizers.SGD(0.5), kernel_constraint=keras.constraints.MaxNorm(0.5))
    parity.check(build, _fit(*_data(13), 5), on=("mirrored2",))


@pytest.mark.parametrize("clip", [{"global_clipnorm": 0.5}, {"clipnorm": 0.3}, {"clipvalue": 0.1}], ids=str)
def test_the_optimizers_own_clipping_sees_aggregated_gradients(parity, clip):
    x, y = _data(13, scale=10)
    parity.check(_dense(lambda: keras.optimizers.SGD(1.0, **clip)), _fit(x, y, 5), on=("mirrored2", "mirrored4"))


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_clip_global_norm_equals_the_optimizers_global_clipnorm(parity, strategies, accumulate_steps):
    x, y = _data(13, scale=10)
    keras.utils.set_random_seed(1)
    stock = _dense(lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.5))()
    start = stock.get_weights()
    _fit(x, y, 5)(stock)
    for name in ("one_device", "mirrored2"):
        with strategies[name].scope():
            model = _dense(lambda: keras.optimizers.SGD(1.0))()
        model.set_weights(start)
        tfdist.prepare(model, clip_global_norm=0.5, accumulate_steps=accumulate_steps)
        _fit(x, y, 5)(model)
        for found, expected in zip(model.get_weights(), stock.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_gradient_accumulation_of_the_optimizer_with_a_last_incomplete_one(parity):
    parity.check(
        _dense(lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)),
        _fit(*_data(13), 5, epochs=3),  # 9 steps: the last accumulation stays incomplete
        on=("one_device", "mirrored2"),
    )


def test_ema_that_overwrites_the_weights(parity):
    parity.check(
        _dense(lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)),
        _fit(*_data(13), 5, epochs=3),
        on=("one_device", "mirrored2"),
    )


def test_ema_is_written_into_the_weights_when_training_ends(parity):
    parity.check(
        _dense(lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=None)),
        _fit(*_data(13), 5),
        on=("mirrored2",),
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_accumulate_steps_equal_the_whole_batch(parity, count):
    parity.check(
        _dense(lambda: keras.optimizers.Adam(0.01)), _fit(*_data(13), 6), on=("mirrored2",), accumulate_steps=count
    )


@pytest.mark.parametrize("bad_row", [0, 3], ids=["replica 0", "replica 1"])
def test_loss_scaling_skips_a_step_on_all_replicas_when_one_overflows(parity, bad_row):
    x, y = _data(12)
    x[4 + bad_row] = np.inf  # the second batch of four
    scaled = lambda: keras.optimizers.LossScaleOptimizer(  # noqa: E731
        keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=1024.0, dynamic_growth_steps=2
    )
    build = _dense(scaled)

    def train(model):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        return {
            "iterations": keras.ops.convert_to_numpy(model.optimizer.inner_optimizer.iterations),
            "scale": keras.ops.convert_to_numpy(model.optimizer.dynamic_scale),
        }

    parity.check(build, train, on=("one_device", "mirrored2", "mirrored4"))


def test_mixed_float16_skips_and_trains_as_one_device(parity):
    def build():
        policy = keras.DTypePolicy("mixed_float16")
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", dtype=policy),
                keras.layers.Dense(2, dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0005), initial_scale=2.0**12), "mse")
        return model

    x, y = _data(48)
    y[::8] *= 300  # one example of each batch decides whether the batch overflows, however it is cut

    def train(model):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        steps = keras.ops.convert_to_numpy(model.optimizer.iterations)
        assert 0 < steps < 12, "the case needs steps that are taken and steps that are skipped"
        return {"scale": keras.ops.convert_to_numpy(model.optimizer.dynamic_scale), "steps": steps}

    # float16 rounds at 1e-3; the sums of two replicas are rounded once more than one device's.
    parity.check(build, train, on=("mirrored2",), rtol=3e-3, atol=3e-3)


def test_mixed_bfloat16(parity):
    build = _dense(lambda: keras.optimizers.SGD(0.05), keras.DTypePolicy("mixed_bfloat16"))
    # bfloat16 has 8 bits: 2^-8 a rounding.
    parity.check(build, _fit(*_data(13), 5), on=("mirrored2",), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 0.01}, {"clipnorm": 0.005}, {"clipvalue": 0.001}], ids=str)
def test_sparse_gradients(parity, clip):
    rng = np.random.default_rng(0)
    users = rng.integers(0, 50, size=(13, 3)).astype("int32")
    users[::2, 0] = 7  # rows that appear on several replicas and twice in one example
    users[1, 1] = users[1, 0]
    y = rng.normal(size=(13, 1)).astype("float32")

    def build():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, **clip), "mse")
        return model

    for steps in (1, 2):
        parity.check(build, _fit(users, y, 5), on=("mirrored2",), accumulate_steps=steps)
