"""Prediction: every row once, in order, without a word between workers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import data as tfdist_data
from tfdist.errors import UsageError
from tfdist.strategy import num_local_replicas
from tfdist.training import seams
from tfdist.training.runner import Runner


class Predictor:
    """Runs a model forward on this worker's replicas.

    Args:
        runner: the model's runner.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._functions: dict[bool, Any] = {}
        self._weights_key: Any = None

    def predict(self, x: Any, *, batch_size: "int | None", steps: "int | None", callbacks: Any) -> Any:
        """Returns the outputs of all rows of `x`.

        Args:
            x: what `keras.Model.predict` takes.
            batch_size: rows that the local replicas take together.
            steps: batches to predict, or None for all.
            callbacks: a `keras.callbacks.CallbackList`.
        """
        runner = self._runner
        source = tfdist_data.from_keras(x, batch_size=batch_size, shuffle=False, steps=steps)
        local = num_local_replicas(runner.strategy)
        feed = tfdist_data.make_feed(source, tfdist_data.Layout(local, 0, local))
        iterator, steps = feed.begin_epoch(runner.strategy, 0)
        runner.model.stop_predicting = False
        callbacks.on_predict_begin()
        outputs: list[list] = []
        step = 0
        while steps is None or step < steps:
            batch = runner.next_batch(iterator)
            if batch is None:
                break
            callbacks.on_predict_batch_begin(step)
            rows = self._rows(batch[0], batch[1])
            outputs.append(rows)
            callbacks.on_predict_batch_end(step, {"outputs": rows})
            step += 1
            if runner.model.stop_predicting:
                break
        feed.end_epoch(step)
        callbacks.on_predict_end()
        if not outputs:
            raise UsageError("predict: the data gave no batch; check x or the number of steps")
        return keras.tree.map_structure_up_to(outputs[0], lambda *parts: seams.joined_outputs(list(parts)), *outputs)

    def predict_batch(self, x: Any) -> Any:
        """Returns the outputs of one batch, computed on the first local replica."""
        return keras.tree.map_structure(
            lambda t: t if isinstance(t, tf.RaggedTensor | tf.SparseTensor) else np.asarray(t),
            self._function(distributed=False)((keras.tree.map_structure(tf.convert_to_tensor, x),)),
        )

    def _rows(self, data: Any, count: Any) -> Any:
        """Returns the outputs of one batch over the local replicas, dummies left out."""
        strategy = self._runner.strategy
        results = self._function(distributed=True)(data)
        counts = [int(n) for n in strategy.experimental_local_results(count)]
        parts = [result for result, n in zip(results, counts, strict=True) if n]
        if len(parts) == 1:
            return parts[0]
        return keras.tree.map_structure_up_to(parts[0], lambda *t: tf.concat(t, 0), *parts)

    def _function(self, *, distributed: bool) -> Any:
        runner = self._runner
        model, strategy = runner.model, runner.strategy
        key = seams.predict_step_key(model)
        if key != self._weights_key:
            self._functions.clear()
            self._weights_key = key

        def on_replicas(data: Any) -> list:
            per_replica = strategy.run(model.predict_step, args=(data,))
            local = num_local_replicas(strategy)
            flat = [strategy.experimental_local_results(v) for v in tf.nest.flatten(per_replica)]
            return [tf.nest.pack_sequence_as(per_replica, [v[i] for v in flat]) for i in range(local)]

        if distributed not in self._functions:
            function = on_replicas if distributed else model.predict_step
            self._functions[distributed] = (
                function if model.run_eagerly else tf.function(function, reduce_retracing=True, autograph=False)
            )
        return self._functions[distributed]
