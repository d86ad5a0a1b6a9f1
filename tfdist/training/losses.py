"""Loss reductions over the global batch instead of over one replica's part of it."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training import seams
from tfdist.training.frame import DeferredLoss, Frame, FrameStack


def global_loss(loss: keras.losses.Loss, frames: FrameStack, slot: int) -> Callable:
    """Returns a function like `loss` whose value, weighted by share and summed, is the global loss.

    The loss's own `call` gives the values. What it may return:

    - values per example (or per token): reduced as `loss.reduction` says, over the global batch;
    - a scalar: taken as a mean over the examples at hand;
    - a pair (sum, count) of scalars: the global loss is the sum of sums over the sum of counts.

    Args:
        loss: a Keras loss with the standard `__call__`.
        frames: tells the share of the replica that is being traced.
        slot: position among the model's losses.
    """

    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        frame = frames.current
        mask = _combined_mask(seams.get_mask(y_pred), None)
        y_pred, y_true = (
            keras.tree.map_structure(lambda t: keras.ops.convert_to_tensor(t, dtype=loss.dtype), y)
            for y in (y_pred, y_true)
        )
        values = loss.call(y_true, y_pred)
        if isinstance(values, tuple | list):
            return _pair(values, sample_weight, loss, frame, slot)
        mask = _combined_mask(mask, seams.get_mask(values))
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        weights = None
        if mask is not None:
            weights = tf.cast(mask, values.dtype)
        if sample_weight is not None:
            sample_weight = tf.cast(keras.ops.convert_to_tensor(sample_weight), values.dtype)
            if weights is not None:
                weights, sample_weight = _same_rank(weights, sample_weight)
                weights = weights * sample_weight
            else:
                weights = sample_weight
        if weights is not None:
            values, weights = _same_rank(values, weights)
            values = values * weights
        return _reduce(values, weights, mask, loss.reduction, frame, slot)

    return call


def _reduce(
    values: tf.Tensor,
    weights: "tf.Tensor | None",
    mask: "tf.Tensor | None",
    reduction: "str | None",
    frame: Frame,
    slot: int,
) -> tf.Tensor:
    if reduction in (None, "none"):
        return frame.as_local(values)
    if values.shape.rank == 0:
        return values if not frame.additive else frame.share * values
    total = tf.reduce_sum(values)
    if reduction == "sum":
        return frame.as_local(total)
    size = tf.cast(tf.size(values), values.dtype)
    if reduction == "mean_with_sample_weight" and weights is not None:
        return _over_global_count(total, tf.reduce_sum(weights), frame, slot)
    if mask is not None:
        valid = tf.reduce_sum(tf.cast(mask, values.dtype))
        per_mask_entry = size / tf.cast(tf.size(mask), values.dtype)
        return _over_global_count(total, valid * per_mask_entry, frame, slot)
    if frame.uneven_shapes and not values.shape[1:].is_fully_defined():
        return _over_global_count(total, tf.where(frame.count > 0, size, 0.0), frame, slot)
    mean = tf.math.divide_no_nan(total, size)
    return mean if not frame.additive else tf.cast(frame.share, mean.dtype) * mean


def _pair(values: Any, sample_weight: Any, loss: keras.losses.Loss, frame: Frame, slot: int) -> tf.Tensor:
    if len(values) != 2:
        raise UsageError(
            f"loss {loss.name!r} returned {len(values)} values; a loss returns values per example, a scalar mean, "
            "or a pair (sum, count)"
        )
    if sample_weight is not None:
        raise UsageError(
            f"loss {loss.name!r} returns a pair (sum, count), which sample weights cannot be applied to; "
            "return per-example values, or weigh inside the loss"
        )
    total, count = (tf.cast(tf.convert_to_tensor(v), loss.dtype) for v in values)
    return _over_global_count(tf.reduce_sum(total), tf.reduce_sum(count), frame, slot)


def _over_global_count(total: tf.Tensor, count: tf.Tensor, frame: Frame, slot: int) -> tf.Tensor:
    count = tf.stop_gradient(count)
    if not isinstance(frame.share, float):
        # The one example of an empty replica is a dummy: it must not enter the denominator.
        present = tf.cast(frame.count > 0, total.dtype)
        total, count = total * present, count * present
    if frame.defer:
        frame.deferred.append(DeferredLoss(total, count, slot))
        return tf.zeros([], total.dtype)
    if frame.num_replicas > 1:
        if frame.compiled:
            raise UsageError(
                "jit_compile=True: this loss divides by a count that all replicas must sum (a mask, weights or a "
                "(sum, count) pair), which XLA cannot do inside the compiled part; use jit_compile=False"
            )
        context = tf.distribute.get_replica_context()
        count = tf.stop_gradient(context.all_reduce(tf.distribute.ReduceOp.SUM, count))
    return frame.as_local(tf.math.divide_no_nan(total, count))


def _combined_mask(first: "tf.Tensor | None", second: "tf.Tensor | None") -> "tf.Tensor | None":
    if first is None or second is None:
        return second if first is None else first
    return tf.logical_and(tf.cast(first, tf.bool), tf.cast(second, tf.bool))


def _same_rank(first: tf.Tensor, second: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Drops or adds a last axis of size 1 where the ranks differ by one, as Keras's losses do."""
    rank, other = first.shape.rank, second.shape.rank
    if rank == other + 1 and first.shape[-1] == 1:
        if other == 1:
            return first, tf.expand_dims(second, -1)
        return tf.squeeze(first, -1), second
    if other == rank + 1 and second.shape[-1] == 1:
        if rank == 1:
            return tf.expand_dims(first, -1), second
        return first, tf.squeeze(second, -1)
    return first, second
