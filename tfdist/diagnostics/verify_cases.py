"""What `tfdist verify` trains: small models and data, each with something that a wrong distribution gets wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Training:
    """One training, the same with stock Keras and with tfdist.

    Attributes:
        model: returns the model, not compiled.
        loss: returns the loss.
        optimizer: returns the optimizer of tfdist's model.
        data: x, y and perhaps sample weights.
        batch_size: global batch size.
        metrics: names of metrics.
        options: of `tfdist.prepare` and `tfdist.TrainLoop`.
        stock_optimizer: returns the optimizer of the stock model, where `options` do part of its work.
    """

    model: Callable[[], keras.Model]
    loss: Callable[[], Any]
    optimizer: Callable[[], keras.Optimizer]
    data: tuple
    batch_size: int
    metrics: tuple[str, ...] = ("mae",)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    stock_optimizer: Callable[[], keras.Optimizer] | None = None


def training(case: str) -> Training:
    """Returns the training of the case of that name."""
    return _TRAININGS[case]()


def _regression(rows: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (scale * (x[:, :2] + rng.normal(size=(rows, 2)))).astype("float32")


def _dense(policy: str = "float32") -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", dtype=policy),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )


def _mse() -> keras.losses.Loss:
    return keras.losses.MeanSquaredError()


def _momentum() -> keras.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _plain() -> Training:
    return Training(_dense, _mse, _momentum, _regression(16), 8)


def _clip() -> Training:
    return Training(
        _dense,
        _mse,
        lambda: keras.optimizers.SGD(1.0),
        _regression(16, scale=10),
        8,
        options={"clip_global_norm": 0.5},
        stock_optimizer=lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.5),
    )


def _accumulate() -> Training:
    return Training(_dense, _mse, _momentum, _regression(18), 12, options={"accumulate_steps": 3})


def _partial() -> Training:
    # 13 = 5 + 5 + 3 and 3 replicas or more: shares that differ, and replicas with one example or none.
    return Training(_dense, _mse, lambda: keras.optimizers.Adam(0.01), _regression(13), 4)


def _bfloat16() -> Training:
    return Training(lambda: _dense("mixed_bfloat16"), _mse, _momentum, _regression(16), 8)


def _float16() -> Training:
    x, y = _regression(48)
    y[::8] *= 300  # one example of each batch decides whether the batch overflows, however it is cut

    def optimizer() -> keras.Optimizer:
        # At this scale three of the twelve steps overflow and are skipped.
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0005), initial_scale=2.0**12)

    return Training(lambda: _dense("mixed_float16"), _mse, optimizer, (x, y), 8)


def _masked() -> Training:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, size=(8, 8)).astype("int32")
    tokens[4:, 1:] = 0  # the last replicas have far fewer valid tokens
    labels = rng.integers(0, 20, size=(8, 8)).astype("int32")

    def model() -> keras.Model:
        inputs = keras.Input((8,), dtype="int32")
        states = keras.layers.Embedding(20, 6, mask_zero=True)(inputs)
        return keras.Model(inputs, keras.layers.Dense(20)(states))

    def loss() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    return Training(model, loss, lambda: keras.optimizers.SGD(0.5), (tokens, labels), 8, metrics=("accuracy",))


def _weights() -> Training:
    return Training(_dense, _mse, _momentum, (*_regression(13), np.linspace(0, 3, 13, dtype="float32")), 5)


def _sparse() -> Training:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, size=(13, 3)).astype("int32")
    ids[::2, 0] = 7  # a row that many examples ask for

    def model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )

    y = rng.normal(size=(13, 1)).astype("float32")
    return Training(model, _mse, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05), (ids, y), 5)


def _batch_norm() -> Training:
    def model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                # A bias in front of the normalization has no gradient but rounding, which nothing can agree on.
                keras.layers.Dense(4, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(2),
            ]
        )

    return Training(model, _mse, _momentum, _regression(13), 5)


def _buckets() -> Training:
    # A bucket for every gradient, with everything that comes after aggregation.
    return dataclasses.replace(_clip(), options={"hook": "allreduce:bucket_mb=0.00001", "clip_global_norm": 0.5})


def _exact_start() -> Training:
    return dataclasses.replace(_partial(), options={"hook": "powersgd:rank=1,start_step=1000"})


def _local_sgd() -> Training:
    # With SGD, the mean of weights that went one step apart is the step of the mean.
    options = {"hook": "local_sgd:period=1"}
    return Training(_dense, _mse, lambda: keras.optimizers.SGD(0.05), _regression(16), 8, options=options)


_TRAININGS: dict[str, Callable[[], Training]] = {
    "plain": _plain,
    "clip": _clip,
    "accumulate": _accumulate,
    "partial": _partial,
    "bfloat16": _bfloat16,
    "float16": _float16,
    "masked": _masked,
    "weights": _weights,
    "sparse": _sparse,
    "batch_norm": _batch_norm,
    "hook_buckets": _buckets,
    "hook_exact_start": _exact_start,
    "hook_local_sgd": _local_sgd,
}
