"""Time stamps inside a compiled step: operations that wait for tensors and then read the clock."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def stamp(after: Any) -> tf.Tensor:
    """Returns the time at which all of `after` was there, as a float64 scalar: seconds since 1970.

    It costs one small operation.

    Args:
        after: tensors, nested; may be none, which gives the time at which the step gets there.
    """
    with tf.control_dependencies(really_there(after)), tf.device("CPU:0"):
        return tf.timestamp()


def really_there(after: Any) -> list[tf.Tensor]:
    """Returns tensors to wait for, on the host: when they are there, all of `after` has really been computed.

    Operations of a GPU count as done when they are in its queue; there a copy of one number to the host, which the
    queue makes last, tells when they have ended.

    Args:
        after: tensors, nested; None among them stand for nothing.
    """
    tensors = [t for t in tf.nest.flatten(after, expand_composites=True) if t is not None]
    on_gpu = [tensor for tensor in tensors if "GPU" in tensor.device]
    if not on_gpu:
        return tensors
    with tf.control_dependencies(tensors):
        last = tf.reshape(on_gpu[-1], [-1])[:1]
    with tf.device("CPU:0"):
        return [tf.identity(last)]


def held(value: Any, until: Sequence) -> Any:
    """Returns `value` for use after the stamps `until`.

    Where a process has few threads, a stamp could stand in a queue behind the work whose begin it is to mark, until
    that has ended. So the last of that work waits for it.

    Args:
        value: tensors, nested.
        until: stamps, or other operations, that wait for `value`, or for more; None among them stand for nothing.
    """
    until = [moment for moment in until if moment is not None]
    if not until:
        return value

    def hold(tensor: Any) -> Any:
        with tf.control_dependencies(until):
            return tf.identity(tensor)

    return tf.nest.map_structure(hold, value, expand_composites=True)


def joined(stamps: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns stamps as one tensor of shape (stamps,)."""
    return tf.stack(stamps) if stamps else tf.zeros([0], tf.float64)
