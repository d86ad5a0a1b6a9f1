"""Only the largest values of the gradients travel."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.bucketed import AUTO, BucketedHook
from tfdist.hooks.message import Message


class TopK(BucketedHook):
    """Sums the largest values of each bucket of each replica; the rest is zero.

    Without error feedback what is left out is lost: the spec `topk` brings it along. Values and their places are
    gathered, so with n replicas each sends n - 1 times 8 bytes for each value.

    Use it on very slow links, with a ratio that still learns. Reference: Aji and Heafield, Sparse communication for
    distributed gradient descent, EMNLP 2017.

    Args:
        ratio: part of the values that travels, in (0, 1].
        bucket_mb: see `BucketedHook`.
    """

    name = "topk"
    lossy = True

    def __init__(self, *, ratio: float = 0.01, bucket_mb: "float | str" = AUTO):
        super().__init__(bucket_mb=bucket_mb)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise UsageError(f"ratio={ratio!r}: a part in (0, 1] is needed, e.g. topk:ratio=0.01")
        self.ratio = float(ratio)

    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Returns the largest values and their places; see `BucketedHook.encode`."""
        if buffer.dtype != tf.float32:
            return Message.exact(buffer)
        size = buffer.shape.num_elements()
        kept = min(size, max(1, math.ceil(self.ratio * size)))
        _, places = tf.math.top_k(tf.abs(buffer), kept, sorted=False)
        # Where a value is not finite, nothing that is sent may be: all replicas have to see it.
        finite = tf.reduce_all(tf.math.is_finite(buffer))
        values = tf.where(finite, tf.gather(buffer, places), float("nan"))
        message = tf.concat([places, tf.bitcast(values, tf.int32)], axis=0)

        def decode(gathered: tf.Tensor) -> tf.Tensor:
            all_places = tf.reshape(gathered[:, :kept], [-1])
            all_values = tf.reshape(tf.bitcast(gathered[:, kept:], tf.float32), [-1])
            return _scattered(all_places, all_values, size)

        return Message(message, _scattered(places, values, size), decode, gathered=True)


def _scattered(places: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    return tf.tensor_scatter_nd_add(tf.zeros([size], values.dtype), places[:, None], values)
