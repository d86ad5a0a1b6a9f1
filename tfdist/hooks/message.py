"""What a replica puts into the sum of a bucket, and how the sum comes out of what travels."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf


def _as_it_is(total: tf.Tensor) -> tf.Tensor:
    return total


@dataclasses.dataclass(frozen=True)
class Message:
    """One replica's part in the sum of a bucket.

    Attributes:
        payload: what travels, of a shape that is equal on all replicas.
        own: what this replica has put into the sum, in the shape of the bucket; for the exact sum, the bucket.
        decode: turns the sum of all payloads, or with `gathered` all payloads, one row each, into the sum of the
            buckets.
        gathered: payloads are gathered, not summed.
    """

    payload: tf.Tensor
    own: tf.Tensor
    decode: Callable[[tf.Tensor], tf.Tensor] = _as_it_is
    gathered: bool = False

    @classmethod
    def exact(cls, buffer: tf.Tensor) -> "Message":
        """Returns the message for the exact sum of `buffer`."""
        return cls(buffer, buffer)
