"""The interface of a transport."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Request:
    """One buffer that every replica wants to exchange.

    Attributes:
        buffer: this replica's, of any shape that is equal on all replicas (but see "rows").
        kind: what comes back. "sum": the sum over all replicas, in the buffer's shape. "gather": everybody's buffer
            in the order of the replicas, in shape (replicas, *buffer.shape). "rows": the rows of all replicas, one
            replica after the other, of which they may have unequally many.
    """

    buffer: tf.Tensor
    kind: Literal["sum", "gather", "rows"] = "sum"


class Transport(abc.ABC):
    """Moves buffers between the replicas of a job.

    All methods are called in replica context, on every replica, in the same order and with the same requests.
    """

    name: str = "transport"

    @abc.abstractmethod
    def exchange(self, requests: Sequence[Request]) -> list[tf.Tensor]:
        """Returns what comes back for each request; each begins as soon as its buffer is there."""

    def all_reduce(self, buffer: tf.Tensor) -> tf.Tensor:
        """Returns the sum of `buffer` over all replicas."""
        return self.exchange([Request(buffer, "sum")])[0]

    def all_gather(self, buffer: tf.Tensor) -> tf.Tensor:
        """Returns `buffer` of every replica in the order of the replicas: shape (replicas, *buffer.shape)."""
        return self.exchange([Request(buffer, "gather")])[0]

    def participants(self) -> int:
        """Returns how many take part: the replicas of the job, unless the transport says otherwise."""
        return tf.distribute.get_replica_context().num_replicas_in_sync

    def takes_part(self) -> bool:
        """Whether this replica does; one that does not must not exchange anything."""
        return True

    def may_branch(self) -> bool:
        """Whether exchanges may stand in a branch of a condition."""
        return True

    def pending(self) -> list[tf.Tensor]:
        """Returns what has to be there before a branch of a condition may exchange something."""
        return []

    def follow(self, results: Sequence[tf.Tensor]) -> None:  # noqa: B027, most transports need no order
        """Makes later exchanges wait for `results` of a branch that may have exchanged something."""

    def bytes_sent(self, request: Request) -> int:
        """Returns what one participant sends for `request`, as far as its shape is known.

        A sum takes 2 (n - 1) / n times the buffer, as in a ring; to gather takes the own buffer and all but one
        other's, once. Reference: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
        workstations, 2009.
        """
        participants = self.participants()
        size = (request.buffer.shape.num_elements() or 0) * request.buffer.dtype.size
        return (
            round(2 * (participants - 1) / participants * size) if request.kind == "sum" else (participants - 1) * size
        )
