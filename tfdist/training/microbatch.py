"""Cutting a replica's batch into micro-batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data import num_rows, slice_rows
from tfdist.training.frame import Frame


def micro_batch(data: Any, frame: Frame, index: int, steps: int, *, after: Sequence[Any] = ()) -> tuple[Any, Frame]:
    """Returns micro-batch `index` of `steps` and its frame.

    Rows are dealt as evenly as possible, in order. Where there are fewer rows than micro-batches, the empty
    ones get the first row as a dummy, with a count of 0.

    Args:
        data: the replica's batch; every leaf has the rows first.
        frame: the replica's frame.
        index: which micro-batch.
        steps: how many there are.
        after: tensors that must exist before this micro-batch may start.
    """
    if steps == 1:
        return data, frame
    rows = num_rows(data)
    static = rows if isinstance(rows, int) and rows % steps == 0 and isinstance(frame.share, float) else None
    if static is not None:
        size = static // steps
        start: Any = index * size
        count = tf.constant(size, tf.int32)
        share: Any = frame.share / steps
    else:
        count = frame.count // steps + tf.cast(index < frame.count % steps, tf.int32)
        start = index * (frame.count // steps) + tf.minimum(index, frame.count % steps)
        size = tf.maximum(count, 1)
        start = tf.where(count > 0, start, 0)
        share = tf.math.divide_no_nan(tf.cast(count, tf.float32), tf.cast(frame.total, tf.float32))
    with tf.control_dependencies(_tensors(after)):
        start = tf.identity(start)
    part = slice_rows(data, start, size)
    part_frame = dataclasses.replace(
        frame, count=count, share=share, defer=True, compiled=False, sum_like=[], deferred=[]
    )
    return part, part_frame


def _tensors(values: Sequence[Any]) -> list[tf.Tensor]:
    return [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
