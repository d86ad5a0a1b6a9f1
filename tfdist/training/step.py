"""The replica step: one for `fit` and the custom loop, so that both give the same numbers.

batch -> forward -> loss as a share of the global batch -> backward (micro-batches accumulate locally) -> the hook
aggregates -> finiteness check and clipping on the aggregated gradients -> optimizer -> metrics.
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training import seams
from tfdist.training.collective_state import average_updates, global_metric_results
from tfdist.training.frame import Frame, FrameStack, make_frame
from tfdist.training.gradients import Gradients, update_metrics
from tfdist.training.marks import Marks
from tfdist.training.options import BatchLayout, StepOptions
from tfdist.training.own_step import OwnStep
from tfdist.training.scope import own_step_scope, step_scope, track_loss
from tfdist.training.stamps import joined
from tfdist.training.update import apply_gradients

Logs = dict[str, tf.Tensor] | None


class Step:
    """Training and evaluation of one batch, in cross-replica context, inside or outside a `tf.function`.

    Args:
        model: a compiled and built Keras model, made under `strategy`.
        strategy: the strategy.
        options: how to train.
        timed: whether training takes time stamps (see `train`).
        marks: where training notes how far it has come; None where nobody watches.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
        *,
        timed: bool = False,
        marks: "Marks | None" = None,
    ):
        self.model = model
        self.strategy = strategy
        self.options = options
        self.timed = timed
        self.marks = marks
        self.num_replicas = strategy.num_replicas_in_sync
        self.additive = getattr(model, "distribute_reduction_method", None) == "sum"
        self._frames = FrameStack()
        self._gradients = Gradients(
            model, self._frames, steps=options.accumulate_steps, jit_compile=options.jit_compile
        )
        self._own = OwnStep(model, self._frames, options)
        self._own_train_step = seams.has_own_train_step(model)
        self._own_test_step = seams.has_own_test_step(model)
        if self._own_train_step and options.accumulate_steps > 1:
            raise UsageError(
                f"accumulate_steps={options.accumulate_steps}: model {model.name!r} has its own train_step, whose "
                "calls of the optimizer cannot be cut into micro-batches; accumulate in the train_step, or use "
                "gradient_accumulation_steps of the optimizer"
            )

    def train(self, batch: Any, layout: BatchLayout, *, with_logs: bool) -> "tuple[Logs, tuple[tf.Tensor, ...] | None]":
        """Trains on one global batch.

        Args:
            batch: per-replica `(data, count, total)`, as a feed gives it.
            layout: what is known about the batches.
            with_logs: whether the logs are wanted.

        Returns:
            The logs over the global batch and the epoch so far, equal on all replicas and workers; None
            without `with_logs` (except for a model with its own `train_step`). And, where the step is timed, for
            each of this process's replicas begin and end of each aggregation of gradients, one after the other, in
            shape (2 * aggregations,); else None.
        """
        with step_scope(self.model, self._frames, self.num_replicas):
            if not self._own_train_step:
                logs, intervals = self._on_replicas(self._train, batch, layout, with_logs)
            else:
                with own_step_scope(self.model, self._frames), self._own.aggregating():
                    logs, intervals = self._on_replicas(self._own_train, batch, layout, with_logs)
        if self.timed:
            intervals = self.strategy.experimental_local_results(intervals)
        return self._first(logs), intervals

    def test(self, batch: Any, layout: BatchLayout, *, with_logs: bool) -> Logs:
        """Evaluates one global batch; returns the logs (see `train`)."""
        with step_scope(self.model, self._frames, self.num_replicas):
            if not self._own_test_step:
                return self._first(self._on_replicas(self._test, batch, layout, with_logs))
            with own_step_scope(self.model, self._frames):
                return self._first(self._on_replicas(self._own_test, batch, layout, with_logs))

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all replicas since they were last reset."""
        return self._first(self.strategy.run(lambda: global_metric_results(self.model)))

    def _on_replicas(self, replica_step: Any, batch: Any, layout: BatchLayout, with_logs: bool) -> Any:
        return self.strategy.run(replica_step, args=(*batch, layout, with_logs))

    def _first(self, values: Any) -> Any:
        """Takes the first local replica's values; they are equal on all."""
        return tf.nest.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], values)

    def _frame(self, count: tf.Tensor, total: tf.Tensor, layout: BatchLayout, additive: bool = False) -> Frame:
        return make_frame(
            count,
            total,
            num_replicas=self.num_replicas,
            full_batches=layout.full_batches,
            presharded=layout.presharded,
            additive=additive,
        )

    def _train(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        model = self.model
        optimizer = model.optimizer
        frame = self._watched(self._frame(count, total, layout))
        self._frames.push(frame)
        gradients = self._gradients.accumulated(data, frame)
        average_updates(list(frame.updated.values()), frame)
        logs = global_metric_results(model) if with_logs else None
        variables = model.trainable_variables
        if variables:
            apply_gradients(
                optimizer,
                gradients,
                variables,
                hook=self.options.hook,
                clip_global_norm=self.options.clip_global_norm,
                stamps=frame.stamps,
                marks=frame.marks,
            )
        self._frames.pop()
        return logs, self._intervals(frame)

    def _watched(self, frame: Frame) -> Frame:
        frame.stamps = [] if self.timed else None
        frame.marks = self.marks
        return frame

    def _intervals(self, frame: Frame) -> "tf.Tensor | None":
        return joined(frame.stamps) if self.timed else None

    def _test(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        model = self.model
        frame = self._frame(count, total, layout)
        self._frames.push(frame)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = seams.call_model(model, x, training=False)
        loss = seams.compute_loss(model, x, y, y_pred, sample_weight, training=False)
        track_loss(seams.loss_tracker(model), loss, self._frames)
        update_metrics(model, x, y, y_pred, sample_weight, frame)
        logs = global_metric_results(model) if with_logs else None
        self._frames.pop()
        return logs

    def _own_train(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        frame = self._watched(self._frame(count, total, layout, self.additive))
        return self._own.train(data, frame), self._intervals(frame)

    def _own_test(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        return self._own.test(data, self._frame(count, total, layout, self.additive))
