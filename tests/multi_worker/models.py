"""Tiny models and data for the bodies; equal on every worker and in the test process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def rows(count: int, width: int = 3, seed: int = 5) -> np.ndarray:
    """Returns float32 data."""
    return np.random.default_rng(seed).normal(size=(count, width)).astype("float32")


def regression(count: int, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns x of three columns and y of one."""
    x = rows(count, 3, seed)
    return x, (x @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.1 * rows(count, 1, seed + 1)).astype("float32")


def labelled(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x of three columns and labels 0 to 2."""
    x = rows(count)
    return x, x.argmax(1).astype("int32")


def dense(outputs: int = 1, seed: int = 1) -> keras.Model:
    """Returns a model of two layers for three columns."""
    init = keras.initializers.GlorotUniform(seed)
    return keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(4, activation="tanh", kernel_initializer=init),
            keras.layers.Dense(outputs, kernel_initializer=keras.initializers.GlorotUniform(seed + 1)),
        ]
    )


def classifier(job: Any, optimizer: Callable | None = None, **options: Any) -> keras.Model:
    """Returns a compiled model for `labelled`, prepared with `options` on workers."""
    with job.scope():
        model = dense(3)
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return job.prepare(model, **options)


def regressor(job: Any, optimizer: Callable | None = None, **options: Any) -> keras.Model:
    """Returns a compiled model for `regression`, prepared with `options` on workers."""
    with job.scope():
        model = dense(1)
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return job.prepare(model, **options)


def outcome(model: keras.Model, history: Any = None, **more: Any) -> dict:
    """Returns what is compared: weights, the optimizer's variables, the history."""
    found: dict[str, Any] = {"weights": [np.asarray(w) for w in model.get_weights()], **more}
    if model.optimizer is not None:
        found["optimizer"] = [np.asarray(v) for v in model.optimizer.variables]
    if history is not None:
        found["history"] = history.history
    return found


class Counter:
    """A model that counts how often it is trained on each of `count` examples, over all workers.

    Attributes:
        model: takes the examples' numbers, int32.
        steps: how many steps this worker was told of, for each epoch.
    """

    def __init__(self, job: Any, count: int, **options: Any):
        with job.scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((1,), dtype="int32"),
                    keras.layers.Embedding(count, 1, embeddings_initializer="zeros"),
                ]
            )
            model.compile(keras.optimizers.SGD(1.0), _Used(reduction="sum"), **options)
        self.model = job.prepare(model)
        self.steps: list[int] = []

    def fit(self, *args: Any, callbacks: Any = (), **options: Any) -> list[list[int]]:
        """Trains; returns how often each example was used in each epoch."""
        counts: list[list[int]] = []
        self.steps = []
        before = self._table()

        def begin(epoch: int, logs: Any = None) -> None:
            self.steps.append(0)

        def step(batch: int, logs: Any = None) -> None:
            self.steps[-1] = batch + 1

        def end(epoch: int, logs: Any = None) -> None:
            nonlocal before
            table = self._table()
            counts.append(np.rint(table - before).astype(int).tolist())
            before = table

        watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_end=step, on_epoch_end=end)
        self.model.fit(*args, verbose=0, callbacks=[watch, *callbacks], **options)
        return counts

    def _table(self) -> np.ndarray:
        return np.asarray(self.model.get_weights()[0])[:, 0]


class _Used(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.sum(y_pred, axis=range(1, len(y_pred.shape)))


def numbers(count: int) -> np.ndarray:
    """Returns the numbers of the examples of a `Counter`."""
    return np.arange(count, dtype="int32")[:, None]
