"""No communication at all: the ceiling that aggregation is measured against."""

import logging
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.hooks.base import Gradient, Hook, HookReport

_log = logging.getLogger("tfdist")


class NoOp(Hook):
    """Leaves each replica with its own gradients, as if the others' were the same: the replicas drift apart.

    For measuring only: what a step takes with it no aggregation can beat. The model that comes out is of no use.
    """

    name = "noop"
    lossy = True

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Says loudly what this is."""
        _log.warning(
            "hook='noop': GRADIENTS ARE NOT AGGREGATED. The replicas drift apart and the model that comes out is of no "
            "use; this hook is for measuring what communication costs"
        )

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns this replica's gradients, multiplied with the number of replicas."""
        return [times(g, tf.distribute.get_replica_context().num_replicas_in_sync) for g in gradients]

    @property
    def report(self) -> "HookReport | None":
        """Nothing is sent."""
        return HookReport(0, 0)


def times(gradient: Gradient, factor: int) -> Gradient:
    """Returns `gradient` times `factor`; sparse stays sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
