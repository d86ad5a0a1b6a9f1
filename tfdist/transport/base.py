"""The interface of a transport."""

import abc

import tensorflow as tf


class Transport(abc.ABC):
    """Moves buffers between the replicas of a job.

    All methods are called in replica context, on every replica, in the same order and with equal shapes.
    """

    name: str = "transport"

    @abc.abstractmethod
    def all_reduce(self, buffer: tf.Tensor) -> tf.Tensor:
        """Returns the sum of `buffer` over all replicas, of the same shape and dtype."""

    @abc.abstractmethod
    def all_gather(self, buffer: tf.Tensor) -> tf.Tensor:
        """Returns `buffer` of every replica in the order of the replicas: shape (replicas, *buffer.shape)."""

    def all_reduce_bytes(self, num_bytes: int, replicas: int) -> int:
        """Returns what one replica sends in `all_reduce` of `num_bytes`: 2 (n - 1) / n of them, as in a ring.

        Reference: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
        """
        return round(2 * (replicas - 1) / replicas * num_bytes)

    def all_gather_bytes(self, num_bytes: int, replicas: int) -> int:
        """Returns what one replica sends in `all_gather` of `num_bytes`: its own and all but one other's, once."""
        return (replicas - 1) * num_bytes
