"""What is timed: pairs of functions that do the same work, stock or hand-written on one side, tfdist on the other."""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import models
import tfdist

BATCH_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two ways to do the same steps.

    Attributes:
        name: of the row in the table.
        other: runs some steps the other way and returns the seconds of one step; None where it cannot.
        ours: the same with tfdist.
        target: largest ratio of ours to the other that is wanted, or None.
    """

    name: str
    other: Callable[[], float] | None
    ours: Callable[[], float]
    target: float | None = None


def one_device(steps: int) -> list[Pair]:
    """Returns the pairs without a strategy on the stock side and under "one_device" on tfdist's."""
    strategy = tfdist.make_strategy("one_device")
    none = tf.distribute.get_strategy()
    return [
        _fit("fit_mlp_one_device", _mlp, none, strategy, steps, target=0.85),
        _fit("fit_mlp_dataset_one_device", _mlp, none, strategy, steps, dataset=True),
        _start("fit_of_one_step_one_device", none, strategy),
        _fit("fit_cnn_one_device", _cnn, none, strategy, steps, target=1.0),
        _fit("fit_transformer_one_device", _transformer, none, strategy, max(2, steps // 10), target=1.0),
    ]


def mirrored(steps: int) -> list[Pair]:
    """Returns the pairs on two devices of this machine; stock fit has TensorFlow's default communication."""
    strategy = tfdist.make_strategy("mirrored", num_devices=2)
    stock = tf.distribute.MirroredStrategy(strategy.extended.worker_devices)
    sixteen = _fit("fit_mlp_mirrored_16_steps_per_call", _mlp, stock, strategy, 16 * -(-steps // 16), per_call=16)
    return [
        _fit("fit_mlp_mirrored", _mlp, stock, strategy, steps, target=0.6),
        dataclasses.replace(sixteen, other=None),  # stock Keras fails here
        _start("fit_of_one_step_mirrored", stock, strategy),
        _fit("fit_cnn_mirrored", _cnn, stock, strategy, steps, target=1.0),
        _fit("fit_transformer_mirrored", _transformer, stock, strategy, max(2, steps // 10), target=1.0),
        _loop("loop_mlp_mirrored", _mlp, strategy, steps),
        _loop("loop_cnn_mirrored", _cnn, strategy, steps),
    ]


def multi_worker(steps: int) -> list[Pair]:
    """Returns the pairs over the workers of this job."""
    strategy = tfdist.make_strategy("multi_worker")
    return [_loop("loop_mlp_multi_worker", _mlp, strategy, steps)]


def telemetry(steps: int) -> list[Pair]:
    """Returns the pairs without and with `ScalingCallback`, both of tfdist."""
    strategy = tfdist.make_strategy("mirrored", num_devices=2)
    return [
        _fit("telemetry_mlp_mirrored", _mlp, strategy, strategy, steps, target=1.01, telemetry=True),
        _fit("telemetry_cnn_mirrored", _cnn, strategy, strategy, steps, target=1.01, telemetry=True),
        _fit(
            "telemetry_transformer", _transformer, strategy, strategy, max(2, steps // 5), target=1.01, telemetry=True
        ),
    ]


def _mlp() -> tuple[keras.Model, tuple[np.ndarray, np.ndarray]]:
    model = models.build(models.find("mlp"), image_shape=(784,), width=512)
    return model, _images((784,), 10)


def _cnn() -> tuple[keras.Model, tuple[np.ndarray, np.ndarray]]:
    return models.build(models.find("digits_cnn")), _images((8, 8, 1), 10)


def _transformer() -> tuple[keras.Model, tuple[np.ndarray, np.ndarray]]:
    model = models.build(models.find("transformer_lm"), vocab=256, seq_len=32, width=64, depth=2)
    tokens = np.random.default_rng(0).integers(0, 256, size=(BATCH_SIZE, 33)).astype("int32")
    return model, (tokens[:, :-1], tokens[:, 1:])


def _images(shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16 * BATCH_SIZE, *shape)).astype("float32")
    return x, rng.integers(0, classes, size=len(x)).astype("int32")


def loss() -> keras.losses.Loss:
    """Returns the loss that all cases train with."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _optimizer() -> keras.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _fit(
    name: str,
    build: Callable[[], tuple],
    stock_strategy: tf.distribute.Strategy,
    strategy: tf.distribute.Strategy,
    steps: int,
    *,
    target: float | None = None,
    per_call: int = 1,
    dataset: bool = False,
    telemetry: bool = False,
) -> Pair:
    """Both sides get the same arrays, or the same dataset; timed are two epochs of `steps` steps after a first one.

    With `telemetry` both are tfdist's, and ours has a ScalingCallback.
    """
    log_dir = tempfile.TemporaryDirectory()

    def side(where: tf.distribute.Strategy, prepared: bool, watched: bool = False) -> Callable[[], float]:
        with where.scope():
            model, (x, y) = build()
            model.compile(_optimizer(), loss(), metrics=["accuracy"], steps_per_execution=per_call)
        if prepared:
            tfdist.prepare(model)
        rows = np.arange(steps * BATCH_SIZE) % len(x)
        x, y = x[rows], y[rows]
        data: dict[str, Any] = {"x": x, "y": y, "batch_size": BATCH_SIZE}
        if dataset:
            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE, drop_remainder=True)
            data = {"x": batches.prefetch(2)}

        def run() -> float:
            ends = EpochEnds()
            callbacks = [tfdist.ScalingCallback(log_dir.name), ends] if watched else [ends]
            model.fit(**data, epochs=3, verbose=0, callbacks=callbacks)
            return (ends.times[-1] - ends.times[0]) / (2 * steps)

        return run

    return Pair(name, side(stock_strategy, telemetry), side(strategy, True, telemetry), target)


class EpochEnds(keras.callbacks.Callback):
    """Notes when each epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())


def _start(name: str, stock_strategy: tf.distribute.Strategy, strategy: tf.distribute.Strategy) -> Pair:
    """What a call of fit costs besides its steps: both sides train one step."""

    def side(where: tf.distribute.Strategy, prepared: bool) -> Callable[[], float]:
        with where.scope():
            model, (x, y) = _mlp()
            model.compile(_optimizer(), loss(), metrics=["accuracy"])
        if prepared:
            tfdist.prepare(model)

        def run() -> float:
            start = time.perf_counter()
            model.fit(x[:BATCH_SIZE], y[:BATCH_SIZE], batch_size=BATCH_SIZE, epochs=1, verbose=0)
            return time.perf_counter() - start

        return run

    return Pair(name, side(stock_strategy, False), side(strategy, True))


def _loop(name: str, build: Callable[[], tuple], strategy: tf.distribute.Strategy, steps: int) -> Pair:
    """Both sides run all steps in one `tf.function` call, with loss and accuracy counted on the way."""
    with strategy.scope():
        model, (x, y) = build()
    loop = tfdist.TrainLoop(model, loss=loss(), optimizer=_optimizer(), metrics=["accuracy"], steps_per_loop=steps)
    rows = np.arange(steps * BATCH_SIZE) % len(x)
    source = tfdist.data.ArraySource((x[rows], y[rows]), batch_size=BATCH_SIZE, shuffle=False)

    def ours() -> float:
        start = time.perf_counter()
        loop.run(source, steps=steps)
        return (time.perf_counter() - start) / steps

    return Pair(name, _hand_written(build, strategy, steps), ours, 1.03)


def _hand_written(build: Callable[[], tuple], strategy: tf.distribute.Strategy, steps: int) -> Callable[[], float]:
    """The loop that TensorFlow's guide shows, for whole batches."""
    with strategy.scope():
        model, (x, y) = build()
        optimizer = _optimizer()
        optimizer.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH_SIZE, drop_remainder=True).prefetch(2)
    iterator = iter(strategy.experimental_distribute_dataset(batches))

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_sum(losses) / tf.cast(tf.size(losses) * strategy.num_replicas_in_sync, losses.dtype)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        mean_loss.update_state(losses)
        accuracy.update_state(y, logits)

    @tf.function
    def train(iterator: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(replica_step, args=next(iterator))

    def run() -> float:
        start = time.perf_counter()
        mean_loss.reset_state()
        accuracy.reset_state()
        train(iterator)
        float(mean_loss.result()), float(accuracy.result())
        return (time.perf_counter() - start) / steps

    return run
