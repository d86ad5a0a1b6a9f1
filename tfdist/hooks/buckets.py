"""Buckets: gradients side by side in buffers, in the order in which the backward pass makes them."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

MEBIBYTE = 2**20

# What is done to a gradient after the backward pass has made it: it says nothing about when that was.
_AFTERWARDS = {"Add", "AddV2", "AddN", "Cast", "DivNoNan", "Identity", "Mul", "RealDiv", "Reshape", "Sub"}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        indices: which gradients, in the order in which they lie in the buffer.
        dtype: of the buffer.
        sizes: elements of each.
        shapes: shape of each.
    """

    indices: tuple[int, ...]
    dtype: tf.DType
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def pack(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the buffer of this bucket's gradients, of shape (elements,)."""
        flat = [tf.reshape(gradients[i], [-1]) for i in self.indices]
        return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)

    def unpack(self, buffer: tf.Tensor) -> list[tf.Tensor]:
        """Returns the gradients that lie in `buffer`, in the order of `indices`."""
        parts = [buffer] if len(self.sizes) == 1 else tf.split(buffer, self.sizes)
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def make_buckets(gradients: Sequence[tf.Tensor], bucket_bytes: float) -> list[Bucket]:
    """Returns buckets of at most `bucket_bytes` (a larger gradient has one of its own), in backward order.

    The first bucket to be full is the first to travel, while the backward pass goes on: the order is what lets
    communication hide behind it. Reference: Li et al., PyTorch Distributed, VLDB 2020.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tf.DType, list[int]] = {}

    def close(dtype: tf.DType) -> None:
        members = open_buckets.pop(dtype, [])
        if members:
            shapes = tuple(tuple(gradients[i].shape.as_list()) for i in members)
            sizes = tuple(gradients[i].shape.num_elements() for i in members)
            buckets.append(Bucket(tuple(members), dtype, sizes, shapes))

    for i in backward_order(gradients):
        dtype = gradients[i].dtype
        members = open_buckets.setdefault(dtype, [])
        if members and sum(map(_bytes, (gradients[j] for j in [*members, i]))) > bucket_bytes:
            close(dtype)
            members = open_buckets.setdefault(dtype, [])
        members.append(i)
    for dtype in list(open_buckets):
        close(dtype)
    return buckets


def backward_order(gradients: Sequence[tf.Tensor]) -> list[int]:
    """Returns the indices of `gradients` in the order in which the backward pass makes them.

    Within a graph this is the order in which their operations were created. Eager tensors and gradients that one
    operation makes (a part compiled by XLA) come last variable first, as in a chain of layers.
    """
    backwards = list(reversed(range(len(gradients))))
    if tf.executing_eagerly() or not gradients:
        return backwards
    graph = tf.compat.v1.get_default_graph()
    created = {operation: number for number, operation in enumerate(graph.get_operations())}

    def made(operation: tf.Operation) -> int:
        if operation.type == "Const":
            return -1
        if operation.type in _AFTERWARDS:
            return max(made(tensor.op) for tensor in operation.inputs)
        return created.get(operation, -1)

    return sorted(backwards, key=lambda i: made(gradients[i].op))


def _bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
