"""Which rows of each global batch this process's replicas take."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.strategy import num_local_replicas, worker_index


@dataclasses.dataclass(frozen=True)
class Layout:
    """The replicas of a job, and which of them run in this process.

    Attributes:
        num_replicas: replicas in the job.
        first_replica: the first one of this process.
        local_replicas: how many run in this process; their numbers follow each other.
    """

    num_replicas: int
    first_replica: int
    local_replicas: int

    def __post_init__(self):
        fits = self.first_replica >= 0 and self.first_replica + self.local_replicas <= self.num_replicas
        if self.local_replicas < 1 or not fits:
            raise UsageError(
                f"Layout: replicas {self.first_replica} to {self.first_replica + self.local_replicas - 1} are not "
                f"within the job's {self.num_replicas}"
            )

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "Layout":
        """Returns the layout of `strategy` in this process."""
        local = num_local_replicas(strategy)
        return cls(strategy.num_replicas_in_sync, worker_index(strategy) * local, local)

    @property
    def is_whole(self) -> bool:
        """Whether this process runs all replicas."""
        return self.local_replicas == self.num_replicas

    @property
    def local(self) -> "Layout":
        """The layout of this process's replicas alone."""
        return Layout(self.local_replicas, 0, self.local_replicas)

    def rows(self, n: Any, replica: Any) -> tuple[Any, Any]:
        """Returns (start, size) of the rows that `replica` takes of a batch of `n`.

        As even as possible, in order: 5 rows over 2 replicas are 3 and 2; 2 rows over 4 are 1, 1, 0 and 0. Works
        on Python ints, NumPy arrays and scalar tensors.
        """
        each, left = n // self.num_replicas, n % self.num_replicas
        if isinstance(n, tf.Tensor):
            replica = tf.cast(replica, n.dtype)
            return replica * each + tf.minimum(replica, left), each + tf.cast(replica < left, n.dtype)
        return replica * each + min(replica, left), each + (1 if replica < left else 0)
