"""One of two ways to communicate, chosen while training."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.transport import Transport


def either(condition: tf.Tensor, yes: Callable[[], Any], no: Callable[[], Any], transport: Transport) -> Any:
    """Returns what `yes` or `no` returns, as `condition`, which is equal on all replicas, says.

    Between CPU workers only the chosen one communicates. Other replicas meet in `merge_call`, which TensorFlow forbids
    within a condition, so there both do, and one result is dropped.
    """
    if not transport.may_branch():
        return tf.nest.map_structure(lambda a, b: tf.where(condition, a, b), yes(), no())
    with tf.control_dependencies(transport.pending()):
        found = tf.cond(condition, yes, no)
    transport.follow(tf.nest.flatten(found))
    return found
