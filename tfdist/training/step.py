"""The replica step: one for `fit` and the custom loop, so that both give the same numbers.

batch -> forward -> loss as a share of the global batch -> backward (micro-batches accumulate locally) -> the hook
aggregates -> finiteness check and clipping on the aggregated gradients -> optimizer -> metrics.
"""

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks import Hook
from tfdist.training import seams
from tfdist.training.collective_state import (
    all_reduce_packed,
    average_updates,
    global_metric_results,
    kept_where,
    metric_variables,
)
from tfdist.training.frame import Frame, FrameStack, make_frame
from tfdist.training.microbatch import micro_batch
from tfdist.training.scope import own_step_scope, recorded_updates, step_scope, track_loss
from tfdist.training.update import added, apply_gradients, scaled


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a model is to be trained.

    Attributes:
        hook: aggregates the gradients.
        accumulate_steps: micro-batches that a replica batch is cut into, with one aggregation for all.
        clip_global_norm: largest norm of the aggregated gradients, or None.
        jit_compile: compile forward and backward pass (the part between collectives) with XLA.
    """

    hook: Hook
    accumulate_steps: int = 1
    clip_global_norm: "float | None" = None
    jit_compile: bool = False

    def __post_init__(self):
        if isinstance(self.accumulate_steps, bool) or not isinstance(self.accumulate_steps, int):
            raise UsageError(f"accumulate_steps={self.accumulate_steps!r}: an integer of at least 1 is needed")
        if self.accumulate_steps < 1:
            raise UsageError(f"accumulate_steps={self.accumulate_steps}: an integer of at least 1 is needed")
        if self.clip_global_norm is not None and not self.clip_global_norm > 0:
            raise UsageError(f"clip_global_norm={self.clip_global_norm!r}: a norm above 0 is needed, or None")


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """What is known about the batches while the step is traced (see `tfdist.data.Feed`).

    Attributes:
        full_batches: every replica has the same number of examples in every batch.
        presharded: each worker knows its own part of the global batch only.
    """

    full_batches: bool = False
    presharded: bool = False


class Step:
    """Training and evaluation of one batch, in cross-replica context, inside or outside a `tf.function`.

    Args:
        model: a compiled and built Keras model, made under `strategy`.
        strategy: the strategy.
        options: how to train.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, options: StepOptions):
        self.model = model
        self.strategy = strategy
        self.options = options
        self.num_replicas = strategy.num_replicas_in_sync
        self.additive = getattr(model, "distribute_reduction_method", None) == "sum"
        self._frames = FrameStack()
        self._own_train_step = seams.has_own_train_step(model)
        self._own_test_step = seams.has_own_test_step(model)
        if self._own_train_step and options.accumulate_steps > 1:
            raise UsageError(
                f"accumulate_steps={options.accumulate_steps}: model {model.name!r} has its own train_step, whose "
                "calls of the optimizer cannot be cut into micro-batches; accumulate in the train_step, or use "
                "gradient_accumulation_steps of the optimizer"
            )

    def train(self, batch: Any, layout: BatchLayout, *, with_logs: bool) -> "dict[str, tf.Tensor] | None":
        """Trains on one global batch.

        Args:
            batch: per-replica `(data, count, total)`, as a feed gives it.
            layout: what is known about the batches.
            with_logs: whether the logs are wanted.

        Returns:
            The logs over the global batch and the epoch so far, equal on all replicas and workers; None
            without `with_logs` (except for a model with its own `train_step`).
        """
        replica_step = self._own_train if self._own_train_step else self._train
        with step_scope(self.model, self._frames, self.num_replicas):
            logs = self.strategy.run(replica_step, args=(*batch, layout, with_logs))
        return self._first(logs)

    def test(self, batch: Any, layout: BatchLayout, *, with_logs: bool) -> "dict[str, tf.Tensor] | None":
        """Evaluates one global batch; see `train`."""
        replica_step = self._own_test if self._own_test_step else self._test
        with step_scope(self.model, self._frames, self.num_replicas):
            logs = self.strategy.run(replica_step, args=(*batch, layout, with_logs))
        return self._first(logs)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all replicas since they were last reset."""
        return self._first(self.strategy.run(lambda: global_metric_results(self.model)))

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
        frame = self._frame(count, total, layout)
        self._frames.push(frame)
        updated: dict[int, keras.Variable] = {}
        with recorded_updates(model, self._frames, updated):
            gradients = self._accumulated(data, frame)
        average_updates(list(updated.values()), frame)
        logs = global_metric_results(model) if with_logs else None
        variables = model.trainable_variables
        if variables:
            apply_gradients(
                optimizer,
                gradients,
                variables,
                hook=self.options.hook,
                clip_global_norm=self.options.clip_global_norm,
            )
        self._frames.pop()
        return logs

    def _accumulated(self, data: Any, frame: Frame) -> list:
        """Runs the micro-batches one after the other; returns this replica's contribution to the gradients."""
        steps = self.options.accumulate_steps
        total: list = [None] * len(self.model.trainable_variables)
        deferred_total: dict[int, list] = {}
        counts: dict[int, Any] = {}
        numerators: dict[int, Any] = {}
        for i in range(steps):
            # The next micro-batch starts when this one's gradients exist: that is what saves the memory.
            after = [g for g in total if g is not None] if i else []
            part, part_frame = micro_batch(data, frame, i, steps, after=after)
            self._frames.push(part_frame)
            gradients, deferred = self._gradients(part, part_frame)
            self._frames.pop()
            total = [added(a, b) for a, b in zip(total, gradients, strict=True)]
            for slot, (numerator, count, part_gradients) in deferred.items():
                before = deferred_total.get(slot, [None] * len(total))
                deferred_total[slot] = [added(a, b) for a, b in zip(before, part_gradients, strict=True)]
                counts[slot] = count + counts.get(slot, 0.0)
                numerators[slot] = numerator + numerators.get(slot, 0.0)
        for slot, count in counts.items():
            if frame.num_replicas > 1:
                count = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, count)
            inverse = tf.math.divide_no_nan(tf.ones_like(count), count)
            total = [added(a, scaled(b, inverse)) for a, b in zip(total, deferred_total[slot], strict=True)]
            self._track_deferred(numerators[slot] * inverse, slot, frame)
        return total

    def _track_deferred(self, contribution: tf.Tensor, slot: int, frame: Frame) -> None:
        tracker = seams.loss_tracker(self.model)
        weight = seams.loss_slots(self.model)[slot].loss_weight
        contribution = tf.cast(contribution, tracker.dtype)
        reported = contribution if weight is None else contribution * weight
        tracker.total.assign_add(reported * tf.cast(frame.total, tracker.dtype))
        for metric in seams.output_loss_metrics(self.model)[slot : slot + 1]:
            metric.total.assign_add(contribution)

    def _gradients(self, data: Any, frame: Frame) -> tuple[list, dict]:
        """Forward and backward pass of one micro-batch, and its metrics."""
        model = self.model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = [v.value for v in model.trainable_variables]

        def forward_backward() -> tuple:
            with tf.GradientTape(persistent=frame.defer) as tape:
                y_pred = seams.call_model(model, x, training=True)
                loss = seams.compute_loss(model, x, y, y_pred, sample_weight, training=True)
                contribution = model.optimizer.scale_loss(frame.weighted(loss))
                numerators = [
                    model.optimizer.scale_loss(self._weighted_slot(term.numerator, term.slot))
                    for term in frame.deferred
                ]
            gradients = tape.gradient(contribution, variables) if variables else []
            deferred = {
                term.slot: (term.numerator, term.count, tape.gradient(numerator, variables))
                for term, numerator in zip(frame.deferred, numerators, strict=True)
            }
            return y_pred, loss, gradients, deferred

        if self.options.jit_compile:
            y_pred, loss, gradients, deferred = self._compiled(forward_backward, frame)
        else:
            y_pred, loss, gradients, deferred = forward_backward()
        tracker = seams.loss_tracker(model)
        if tracker is not None:
            track_loss(tracker, loss, self._frames)
        self._update_metrics(x, y, y_pred, sample_weight, frame)
        return gradients, deferred

    def _weighted_slot(self, value: tf.Tensor, slot: int) -> tf.Tensor:
        weight = seams.loss_slots(self.model)[slot].loss_weight
        return value if weight is None else value * weight

    def _compiled(self, forward_backward: Any, frame: Frame) -> tuple:
        frame.compiled = True
        structure: dict[str, Any] = {}

        def flat() -> list:
            results = forward_backward()
            masks = [seams.get_mask(t) for t in tf.nest.flatten(results[0])]
            structure["results"] = (results, masks)
            return [t for t in tf.nest.flatten((results, masks)) if t is not None]

        tensors = iter(tf.function(flat, jit_compile=True, autograph=False)())
        results, masks = tf.nest.map_structure(
            lambda t: None if t is None else next(tensors), structure["results"]
        )
        for output, mask in zip(tf.nest.flatten(results[0]), masks, strict=True):
            seams.set_mask(output, mask)
        frame.compiled = False
        return results

    def _update_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, frame: Frame) -> None:
        model = self.model
        if isinstance(frame.share, float):
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            return
        variables = metric_variables(seams.default_metric_states(model))
        before = [tf.convert_to_tensor(v.value) for v in variables]
        with tf.control_dependencies(before):
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        kept_where(frame.count > 0, variables, before)

    def _test(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        model = self.model
        frame = self._frame(count, total, layout)
        self._frames.push(frame)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = seams.call_model(model, x, training=False)
        loss = seams.compute_loss(model, x, y, y_pred, sample_weight, training=False)
        track_loss(seams.loss_tracker(model), loss, self._frames)
        self._update_metrics(x, y, y_pred, sample_weight, frame)
        logs = global_metric_results(model) if with_logs else None
        self._frames.pop()
        return logs

    def _own_train(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        del with_logs
        frame = self._frame(count, total, layout, self.additive)
        updated: dict[int, keras.Variable] = {}
        self._frames.push(frame)
        optimizers = seams.optimizers_of(self.model)
        with recorded_updates(self.model, self._frames, updated), self._aggregating(optimizers, frame):
            logs = self._guarded_own_step(self.model.train_step, data, frame)
        average_updates(list(updated.values()), frame)
        logs = self._reduced_own_logs(logs, frame)
        self._frames.pop()
        return logs

    def _own_test(self, data: Any, count: Any, total: Any, layout: BatchLayout, with_logs: bool) -> Any:
        del with_logs
        frame = self._frame(count, total, layout, self.additive)
        self._frames.push(frame)
        logs = self._reduced_own_logs(self._guarded_own_step(self.model.test_step, data, frame), frame)
        self._frames.pop()
        return logs

    def _guarded_own_step(self, own_step: Any, data: Any, frame: Frame) -> Any:
        """Runs a model's own step; a replica without examples leaves no trace in example metrics."""
        with own_step_scope(self.model, self._frames):
            if isinstance(frame.share, float):
                return own_step(data)
            metrics = [m for m in seams.default_metric_states(self.model) if type(m) is not keras.metrics.Mean]
            variables = metric_variables(metrics)
            before = [tf.convert_to_tensor(v.value) for v in variables]
            with tf.control_dependencies(before):
                logs = own_step(data)
            kept_where(frame.count > 0, variables, before)
            return logs

    def _aggregating(self, optimizers: list, frame: Frame) -> Any:
        """Makes the optimizers' `apply` aggregate first: each gradient is that of a local loss."""
        def apply_through_hook(optimizer: keras.Optimizer) -> Any:
            stock = optimizer.apply

            def apply(grads: Any, trainable_variables: Any = None) -> None:
                if tf.distribute.in_cross_replica_context():
                    stock(grads, trainable_variables)
                    return
                variables = list(trainable_variables or self.model.trainable_variables)
                weight = frame.loss_weight
                if not (isinstance(weight, float) and weight == 1.0):
                    grads = [scaled(g, weight) for g in grads]
                apply_gradients(
                    optimizer,
                    grads,
                    variables,
                    hook=self.options.hook,
                    clip_global_norm=self.options.clip_global_norm,
                    apply=stock,
                )

            return apply

        stack = contextlib.ExitStack()
        for optimizer in optimizers:
            stack.enter_context(seams.replaced(optimizer, apply=apply_through_hook(optimizer)))
        return stack

    def _reduced_own_logs(self, logs: Any, frame: Frame) -> Any:
        """Replaces metric results by global ones and reduces every other log over the replicas."""
        if not isinstance(logs, dict):
            logs = {"loss": logs}
        results = global_metric_results(self.model)
        others = {k: tf.convert_to_tensor(v) for k, v in logs.items() if k not in results}
        if others and self.num_replicas > 1:
            weighted = {k: frame.weighted(tf.cast(v, tf.float32)) for k, v in others.items()}
            totals = all_reduce_packed(list(weighted.values()))
            others = dict(zip(weighted, totals, strict=True))
        return {k: results[k] if k in results else others[k] for k in logs}
