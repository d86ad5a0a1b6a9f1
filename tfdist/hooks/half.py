"""Gradients that travel as 16-bit numbers: half the bytes, little loss."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.hooks.bucketed import AUTO, BucketedHook
from tfdist.hooks.message import Message
from tfdist.hooks.state import GroupValue, ReplicaState

_WIDE = (tf.float32, tf.float64)
_HEADROOM = 16.0


class BFloat16(BucketedHook):
    """Sums gradients as bfloat16: the range of float32, 8 bits of precision.

    Use it where the network limits you and nothing may need care: half the bytes, no state, no overflow.
    """

    name = "bf16"
    lossy = True

    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Returns the rounded values; see `BucketedHook.encode`."""
        if buffer.dtype not in _WIDE:
            return Message.exact(buffer)
        narrow = tf.cast(buffer, tf.bfloat16)
        return Message(narrow, tf.cast(narrow, buffer.dtype), decode=lambda total: tf.cast(total, buffer.dtype))


class Float16(BucketedHook):
    """Sums gradients as float16, scaled so that they cannot overflow: 11 bits of precision.

    Values are multiplied by a power of two that follows the largest value of the last step's sum, with room for it
    to grow 16-fold in a step. What would still not fit is cut to the largest value that all replicas can add up; a
    value that is not finite stays so.

    Use it instead of bf16 where gradients are smooth and the three bits matter.
    """

    name = "fp16"
    lossy = True

    def __init__(self, *, bucket_mb: "float | str" = AUTO):
        super().__init__(bucket_mb=bucket_mb)
        self._scale: GroupValue | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the scale."""
        self._scale = GroupValue(variables, tf.ones([]), name="fp16_scale")

    @property
    def state(self) -> list[ReplicaState]:
        """The scale, equal on all replicas."""
        return [self._scale.state]

    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Returns the rounded values; see `BucketedHook.encode`."""
        if buffer.dtype not in _WIDE:
            return Message.exact(buffer)
        scale = tf.cast(self._scale.get(variables), buffer.dtype)
        largest = self._largest_of_each()
        scaled = buffer * scale
        fits = tf.clip_by_value(scaled, tf.cast(-largest, buffer.dtype), tf.cast(largest, buffer.dtype))
        narrow = tf.cast(tf.where(tf.math.is_finite(scaled), fits, scaled), tf.float16)

        def decode(total: tf.Tensor) -> tf.Tensor:
            return tf.cast(total, buffer.dtype) / scale

        return Message(narrow, decode(narrow), decode)

    def end_step(self, totals: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
        """Makes the scale follow the largest value of the sums."""
        wide = [total for total in totals if total.dtype in _WIDE]
        if not wide:
            return
        peak = tf.reduce_max(tf.stack([tf.cast(tf.reduce_max(tf.abs(total)), tf.float32) for total in wide]))
        scale, largest = self._scale.get(variables), self._largest_of_each()
        fitting = _power_of_two(tf.math.log(largest / (_HEADROOM * peak)) / tf.math.log(2.0))
        # A sum of nothing, and one that was cut, do not say how far off the scale is: it goes a long way.
        fitting = tf.where(peak == 0.0, scale * _power_of_two(10.0), fitting)
        fitting = tf.where(peak * scale >= largest, scale * _power_of_two(-20.0), fitting)
        fitting = tf.clip_by_value(fitting, _power_of_two(-100.0), _power_of_two(60.0))
        self._scale.set(variables, tf.where(tf.math.is_finite(peak), fitting, scale))

    def _largest_of_each(self) -> float:
        """Returns the largest value of which all participants can hold one without their sum overflowing."""
        return tf.float16.max / self.transport.participants()


def _power_of_two(exponent: "float | tf.Tensor") -> tf.Tensor:
    return tf.pow(2.0, tf.floor(exponent))
