"""One replica's gradients: forward and backward pass over its micro-batches."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.training import seams
from tfdist.training.collective_state import kept_where, metric_variables
from tfdist.training.frame import Frame, FrameStack
from tfdist.training.microbatch import micro_batch
from tfdist.training.scope import track_loss
from tfdist.training.update import added, scaled


class Gradients:
    """Computes a replica's gradients inside `scope.step_scope`.

    Args:
        model: the model.
        frames: where the frame of each micro-batch is put.
        steps: micro-batches that a replica's batch is cut into.
        jit_compile: compile each forward and backward pass with XLA.
    """

    def __init__(self, model: keras.Model, frames: FrameStack, *, steps: int, jit_compile: bool):
        self.model = model
        self._frames = frames
        self._steps = steps
        self._jit_compile = jit_compile

    def accumulated(self, data: Any, frame: Frame) -> list:
        """Runs the micro-batches one after the other, and updates loss tracker and metrics.

        Args:
            data: this replica's batch.
            frame: its frame.

        Returns:
            This replica's contribution to the gradient of each trainable variable; None where there is none.
        """
        steps = self._steps
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
        weight = seams.loss_weight(self.model, slot)
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

        if self._jit_compile:
            y_pred, loss, gradients, deferred = self._compiled(forward_backward, frame)
        else:
            y_pred, loss, gradients, deferred = forward_backward()
        tracker = seams.loss_tracker(model)
        if tracker is not None:
            track_loss(tracker, loss, self._frames)
        update_metrics(model, x, y, y_pred, sample_weight, frame)
        return gradients, deferred

    def _weighted_slot(self, value: tf.Tensor, slot: int) -> tf.Tensor:
        weight = seams.loss_weight(self.model, slot)
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
        results, masks = tf.nest.map_structure(lambda t: None if t is None else next(tensors), structure["results"])
        for output, mask in zip(tf.nest.flatten(results[0]), masks, strict=True):
            seams.set_mask(output, mask)
        frame.compiled = False
        return results


def update_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, frame: Frame) -> None:
    """Updates the model's metrics on a replica's examples; a dummy example leaves no trace."""
    if isinstance(frame.share, float):
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return
    variables = metric_variables(seams.default_metric_states(model))
    before = [tf.convert_to_tensor(v.value) for v in variables]
    with tf.control_dependencies(before):
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    kept_where(frame.count > 0, variables, before)
