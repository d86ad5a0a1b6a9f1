"""Models with a `train_step` or `test_step` of their own.

The model's code runs as it is. Its losses are means over the examples at hand, as on one device, so each gradient
that reaches an optimizer is weighted by the replica's share before the hook sums it; with
`distribute_reduction_method="sum"` losses and logs are parts of a sum and are summed as they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.training import seams
from tfdist.training.collective_state import (
    all_reduce_packed,
    average_updates,
    global_metric_results,
    kept_where,
    metric_variables,
)
from tfdist.training.frame import Frame, FrameStack
from tfdist.training.options import StepOptions
from tfdist.training.update import apply_gradients, scaled


class OwnStep:
    """Runs a model's own steps inside `scope.step_scope`.

    Args:
        model: the model.
        frames: where the replica's frame is put.
        options: how to train.
    """

    def __init__(self, model: keras.Model, frames: FrameStack, options: StepOptions):
        self.model = model
        self._frames = frames
        self._options = options

    def train(self, data: Any, frame: Frame) -> dict:
        """Runs the model's `train_step` on a replica, inside `aggregating`; returns the logs over all replicas."""
        self._frames.push(frame)
        logs = self._guarded_own_step(self.model.train_step, data, frame)
        average_updates(list(frame.updated.values()), frame)
        logs = self._reduced_own_logs(logs, frame)
        self._frames.pop()
        return logs

    def test(self, data: Any, frame: Frame) -> dict:
        """Runs the model's `test_step` on a replica; returns the logs over all replicas."""
        self._frames.push(frame)
        logs = self._reduced_own_logs(self._guarded_own_step(self.model.test_step, data, frame), frame)
        self._frames.pop()
        return logs

    @contextlib.contextmanager
    def aggregating(self) -> Iterator[None]:
        """Makes the optimizers' `apply` aggregate first: each gradient is that of a local loss.

        Enter it outside of `strategy.run`, as `scope.step_scope`.
        """
        with contextlib.ExitStack() as stack:
            for optimizer in seams.optimizers_of(self.model):
                stack.enter_context(seams.replaced(optimizer, apply=self._apply_through_hook(optimizer)))
            yield

    def _apply_through_hook(self, optimizer: keras.Optimizer) -> Callable:
        stock = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            if tf.distribute.in_cross_replica_context():
                stock(grads, trainable_variables)
                return
            variables = list(trainable_variables or self.model.trainable_variables)
            weight = self._frames.current.loss_weight
            if not (isinstance(weight, float) and weight == 1.0):
                grads = [scaled(g, weight) for g in grads]
            apply_gradients(
                optimizer,
                grads,
                variables,
                hook=self._options.hook,
                clip_global_norm=self._options.clip_global_norm,
                apply=stock,
                stamps=self._frames.current.stamps,
                marks=self._frames.current.marks,
            )

        return apply

    def _guarded_own_step(self, own_step: Any, data: Any, frame: Frame) -> Any:
        """Runs a model's own step; a replica without examples leaves no trace in example metrics."""
        if isinstance(frame.share, float):
            return own_step(data)
        metrics = [m for m in seams.default_metric_states(self.model) if type(m) is not keras.metrics.Mean]
        variables = metric_variables(metrics)
        before = [tf.convert_to_tensor(v.value) for v in variables]
        with tf.control_dependencies(before):
            logs = own_step(data)
        kept_where(frame.count > 0, variables, before)
        return logs

    def _reduced_own_logs(self, logs: Any, frame: Frame) -> Any:
        """Replaces metric results by global ones and reduces every other log over the replicas."""
        if not isinstance(logs, dict):
            logs = {"loss": logs}
        logs = _flattened(logs)
        results = global_metric_results(self.model)
        others = {k: tf.convert_to_tensor(v) for k, v in logs.items() if k not in results}
        if others and frame.num_replicas > 1:
            weighted = {k: frame.weighted(tf.cast(v, tf.float32)) for k, v in others.items()}
            totals = all_reduce_packed(list(weighted.values()))
            others = dict(zip(weighted, totals, strict=True))
        return {k: results[k] if k in results else others[k] for k in logs}


def _flattened(logs: dict) -> dict:
    """Puts the entries of dicts inside `logs` into it, as Keras does: the compiled metrics' result is such a dict."""
    flat: dict = {}
    for name, value in logs.items():
        flat.update(_flattened(value) if isinstance(value, dict) else {name: value})
    return flat
