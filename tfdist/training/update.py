"""From one replica's gradients to updated weights: aggregation, clipping, the optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks import Hook
from tfdist.hooks.buckets import backward_order
from tfdist.liveness.beat import UPDATING, WAITING
from tfdist.training.marks import Marks
from tfdist.training.stamps import held, stamp


def apply_gradients(
    optimizer: keras.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    *,
    hook: Hook,
    clip_global_norm: "float | None" = None,
    apply: "Callable | None" = None,
    stamps: "list[tf.Tensor] | None" = None,
    marks: "Marks | None" = None,
) -> None:
    """Sums gradients over the replicas and lets the optimizer update every replica's variables.

    Call it in replica context, inside `seams.local_updates` of the optimizer. Clipping,
    the finiteness check of loss scaling, accumulation, EMA and weight decay all see the aggregated gradients,
    so every replica decides and computes the same.

    Args:
        optimizer: a Keras optimizer.
        gradients: this replica's contributions; None where a variable has no gradient.
        variables: the variables of `gradients`.
        hook: aggregates them.
        clip_global_norm: largest norm of all aggregated gradients together.
        apply: the optimizer's own `apply`, where the instance's is replaced.
        stamps: gets the times at which the gradients were there, and at which their sums were; and the same for what
            the hook sends after the update.
        marks: gets the same moments.
    """
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaling and not hook.replicas_agree:
        raise UsageError(
            f"hook={hook.name!r}: replicas train by themselves, so loss scaling would skip a step on some and not on "
            "others; use precision float32 or mixed_bfloat16, which need no loss scaling"
        )
    present = [i for i, g in enumerate(gradients) if g is not None]
    # A lossy hook may keep what it leaves out, which must not change its meaning when the loss scale changes.
    factor = optimizer.scale_loss(tf.ones([])) if scaling and hook.lossy else None
    given = [gradients[i] if factor is None else scaled(gradients[i], 1.0 / factor) for i in present]
    if present:
        last = backward_order([_values(g) for g in given])[-1]
        given[last] = held(given[last], _moment(given, stamps, marks, WAITING))
    aggregated = hook.aggregate(given, [variables[i] for i in present]) if present else []
    if present:
        aggregated[last] = held(aggregated[last], _moment(aggregated, stamps, marks, UPDATING))
    gradients = list(gradients)
    for i, gradient in zip(present, aggregated, strict=True):
        gradients[i] = gradient if factor is None else scaled(gradient, factor)
    apply = apply or optimizer.apply

    def update(strategy: tf.distribute.Strategy, gradients: list) -> None:
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(list(variables))

        def on_one_replica(_: Any, *local_gradients: Any) -> None:
            if clip_global_norm is not None:
                # Under loss scaling the gradients are still scaled here, so the bound is scaled as well.
                bound = optimizer.scale_loss(tf.constant(clip_global_norm, tf.float32))
                local_gradients = clip_by_global_norm(local_gradients, bound)
            apply(list(local_gradients), list(variables))

        strategy.extended.update(variables[0].value, on_one_replica, args=tuple(gradients), group=False)

    tf.distribute.get_replica_context().merge_call(update, args=(gradients,))
    if not present:
        return
    updated = [variables[i] for i in present]
    if not hook.sends_after_update or (stamps is None and marks is None):
        hook.after_update(updated)
        return
    _moment([tf.convert_to_tensor(v.value) for v in updated], stamps, marks, WAITING)
    hook.after_update(updated)
    _moment([tf.convert_to_tensor(v.value) for v in updated], stamps, marks, UPDATING)


def _moment(after: Any, stamps: "list[tf.Tensor] | None", marks: "Marks | None", stage: int) -> list:
    """Notes the moment at which `after` is there; returns the operations that do so."""
    moments = []
    if stamps is not None:
        stamps.append(stamp(after))
        moments.append(stamps[-1])
    if marks is not None:
        moments.append(marks.mark(stage, after))
    return moments


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def clip_by_global_norm(gradients: Sequence[Any], bound: tf.Tensor) -> list[Any]:
    """Scales `gradients` down so that their common norm is at most `bound`.

    A norm that is not finite gives gradients that are not finite, which loss scaling then skips.
    Reference: Pascanu et al., On the difficulty of training recurrent neural networks, 2013.
    """
    dense = [_values(g) for g in gradients if g is not None]
    squares = [tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in dense]
    norm = tf.sqrt(tf.add_n(squares))
    factor = bound * tf.minimum(1.0 / norm, 1.0 / bound) + (norm - norm)
    return [scaled(g, factor) for g in gradients]


def scaled(gradient: Any, factor: Any) -> Any:
    """Returns `gradient` times `factor`; sparse stays sparse, None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values * tf.cast(factor, gradient.values.dtype), gradient.indices, gradient.dense_shape
        )
    return gradient * tf.cast(factor, gradient.dtype)


def added(first: Any, second: Any) -> Any:
    """Returns the sum of two gradients; two sparse ones are joined, None counts as zero."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([first.values, second.values], 0),
            tf.concat([first.indices, second.indices], 0),
            first.dense_shape,
        )
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
