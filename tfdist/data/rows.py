"""Rows of batches: counting and cutting, for dense, ragged and sparse leaves alike."""

from typing import Any

import keras
import tensorflow as tf


def num_rows(data: Any) -> Any:
    """Returns the number of rows of a batch: an int where it is static, else an int32 scalar."""
    leaf = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    static = leaf.shape[0] if leaf.shape.rank else None
    if static is not None:
        return static
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def slice_rows(data: Any, start: Any, size: Any) -> Any:
    """Returns rows `start` to `start + size` of every leaf.

    Args:
        data: a structure of tensors with the rows first.
        start: int or int32 scalar.
        size: int or int32 scalar; the result's first dimension is static where it is an int.
    """
    return tf.nest.map_structure(lambda leaf: _slice(leaf, start, size), data)


def _slice(leaf: Any, start: Any, size: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(rest)], 0)
        return tf.sparse.slice(leaf, begin, tf.concat([[tf.cast(size, tf.int64)], rest], 0))
    part = leaf[start : start + size]
    if isinstance(part, tf.Tensor):
        part.set_shape([size if isinstance(size, int) else None, *leaf.shape[1:]])
    return part


def zero_rows(spec: Any) -> Any:
    """Returns a batch that fits `spec`: zeros, with one row where the number of rows is open."""
    return tf.nest.map_structure(_zeros, spec)


def _zeros(spec: tf.TypeSpec) -> Any:
    shape = [1 if d is None else d for d in spec.shape]
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [1 if d is None else d for d in spec.shape[spec.ragged_rank + 1 :]]
        value = _filled([0, *inner], spec.dtype)
        for level in range(spec.ragged_rank):
            splits = [0] * (shape[0] + 1) if level == spec.ragged_rank - 1 else [0]
            value = tf.RaggedTensor.from_row_splits(value, tf.constant(splits, spec.row_splits_dtype))
        return value
    if isinstance(spec, tf.SparseTensorSpec):
        indices = tf.zeros([0, len(shape)], tf.int64)
        return tf.SparseTensor(indices, _filled([0], spec.dtype), tf.constant(shape, tf.int64))
    return _filled(shape, spec.dtype)


def _filled(shape: list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.fill(shape, "") if dtype == tf.string else tf.zeros(shape, dtype)
