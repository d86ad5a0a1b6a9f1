"""State that the replicas must agree on apart from the weights: metrics and moving statistics.

Everything that a step has to exchange besides gradients goes through `all_reduce_packed`: one small
all-reduce for each dtype, whatever the number of tensors.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.training.frame import Frame


def all_reduce_packed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums of `tensors` over all replicas, with one all-reduce for each dtype.

    Call it in replica context, on every replica, with equal shapes.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1 or not tensors:
        return list(tensors)
    result: list[Any] = [None] * len(tensors)
    by_dtype: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    for indices in by_dtype.values():
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], axis=0)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
        sizes = [tf.size(tensors[i]) for i in indices]
        for i, part in zip(indices, tf.split(total, sizes), strict=True):
            result[i] = tf.reshape(part, tf.shape(tensors[i]))
    return result


def metric_variables(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable]:
    """Returns the variables of `metrics`, each once."""
    found: dict[int, keras.Variable] = {}
    for metric in metrics:
        for variable in metric.variables:
            found.setdefault(id(variable), variable)
    return list(found.values())


def global_metric_results(model: keras.Model) -> dict[str, Any]:
    """Returns the values of the model's metrics over the examples of all replicas.

    Call it in replica context. A metric's result is computed from the sums of its variables, so that each
    example counts once, however the replicas share them.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return model.get_metrics_result()
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    variables, parts = [], []
    for variable in metric_variables(model.metrics):
        value = tf.convert_to_tensor(variable.value)
        if not (value.dtype.is_floating or value.dtype.is_integer):
            continue
        if variable.aggregation == "mean":
            value = value / tf.cast(context.num_replicas_in_sync, value.dtype)
        elif variable.aggregation != "sum":
            value = tf.where(is_first, value, tf.zeros_like(value))
        variables.append(variable)
        parts.append(value)
    totals = all_reduce_packed(parts)
    with keras.StatelessScope(state_mapping=list(zip(variables, totals, strict=True))):
        return model.get_metrics_result()


def average_updates(variables: Sequence[keras.Variable], frame: Frame) -> None:
    """Sets each variable to the mean over the replicas, weighted by their share of the batch.

    The replicas start a step with equal values, so the weighted mean of the new values is the old value plus
    the weighted mean of the updates.
    """
    if frame.num_replicas == 1 or not variables:
        return
    values = [tf.convert_to_tensor(v.value) for v in variables]
    totals = all_reduce_packed([value * tf.cast(frame.share, value.dtype) for value in values])
    for variable, total in zip(variables, totals, strict=True):
        variable.value.assign(total)


def kept_where(present: tf.Tensor, variables: Sequence[keras.Variable], before: Sequence[tf.Tensor]) -> None:
    """Takes back what this replica wrote to `variables` since `before`, unless `present`."""
    for variable, old in zip(variables, before, strict=True):
        variable.value.assign(tf.where(present, tf.convert_to_tensor(variable.value), old))
