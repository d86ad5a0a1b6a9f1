"""Gradients that travel as 8-bit integers with one scale for each block of values."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.bucketed import AUTO, BucketedHook
from tfdist.hooks.message import Message
from tfdist.hooks.state import GroupValue, ReplicaState


class Int8(BucketedHook):
    """Sums gradients that were rounded to 8 bits, stochastically, so that the rounding is right on average.

    Each block of values has a scale of its own, so one large value costs precision in its block only. Buffers are
    gathered, not reduced: with n replicas each sends n - 1 times a quarter of its gradients.

    Use it on slow links between few workers. Reference: Alistarh et al., QSGD, NIPS 2017; blocks as in Dettmers,
    8-bit approximations for parallelism in deep learning, ICLR 2016.

    Args:
        block: values with a common scale.
        bucket_mb: see `BucketedHook`.
    """

    name = "int8"
    lossy = True

    def __init__(self, *, block: int = 256, bucket_mb: "float | str" = AUTO):
        super().__init__(bucket_mb=bucket_mb)
        if isinstance(block, bool) or not float(block).is_integer() or block < 4 or block % 4:
            raise UsageError(f"block={block!r}: a multiple of 4 of at least 4 is needed, e.g. int8:block=256")
        self.block = int(block)
        self._step: GroupValue | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the counter that the random numbers come from."""
        self._step = GroupValue(variables, tf.constant(0, tf.int64), name="int8_step")

    @property
    def state(self) -> list[ReplicaState]:
        """The counter, equal on all replicas."""
        return [self._step.state]

    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Returns the rounded values and their scales; see `BucketedHook.encode`."""
        if buffer.dtype != tf.float32:
            return Message.exact(buffer)
        context = tf.distribute.get_replica_context()
        size = buffer.shape.num_elements()
        blocks = -(-size // self.block)
        values = tf.reshape(tf.pad(buffer, [[0, blocks * self.block - size]]), [blocks, self.block])
        scales = tf.reduce_max(tf.abs(values), axis=1) / 127.0
        draws = tf.random.stateless_uniform(values.shape, self._seed(buffer, self._step.get(variables), context))
        rounded = tf.floor(tf.math.divide_no_nan(values, scales[:, None]) + draws)
        eighths = tf.cast(tf.clip_by_value(rounded, -127.0, 127.0), tf.int8)
        # The collectives know no 8-bit numbers: four of them, and a scale, look like 32-bit ones.
        packed = tf.reshape(tf.bitcast(tf.reshape(eighths, [-1, 4]), tf.int32), [-1])
        message = tf.concat([packed, tf.bitcast(scales, tf.int32)], axis=0)

        def decode(gathered: tf.Tensor) -> tf.Tensor:
            parts = [self._restored(gathered[i], blocks, size) for i in range(self.transport.participants())]
            # Not tf.add_n, whose order, and so the last bit, depends on timing.
            return tf.reduce_sum(tf.stack(parts), axis=0)

        return Message(message, self._restored(message, blocks, size), decode, gathered=True)

    def end_step(self, totals: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
        """Counts the step."""
        self._step.set(variables, self._step.get(variables) + 1)

    def _restored(self, message: tf.Tensor, blocks: int, size: int) -> tf.Tensor:
        packed, scales = tf.split(message, [blocks * self.block // 4, blocks])
        eighths = tf.reshape(tf.bitcast(packed, tf.int8), [blocks, self.block])
        values = tf.cast(eighths, tf.float32) * tf.bitcast(scales, tf.float32)[:, None]
        return tf.reshape(values, [-1])[:size]

    def _seed(self, buffer: tf.Tensor, step: tf.Tensor, context: tf.distribute.ReplicaContext) -> tf.Tensor:
        """Differs between steps and replicas; buckets of equal size may share it, which leaves each one unbiased."""
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        place = buffer.shape.num_elements()
        return tf.stack([step * 65537 + replica, tf.constant(place, tf.int64)])
