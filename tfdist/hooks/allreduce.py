"""Exact aggregation: one all-reduce for each bucket of gradients."""

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.base import Gradient, Hook

MEBIBYTE = 2**20


class AllReduce(Hook):
    """The exact sum of the gradients, through TensorFlow's collectives.

    Sparse gradients are gathered and stay sparse.

    Args:
        bucket_mb: size in MiB of the buffers in which gradients travel. TensorFlow's default packs all of
            them into one, which makes the first byte wait for the last gradient; 1 to 4 MiB are about three
            times faster on a ring of CPU workers.
    """

    name = "allreduce"

    def __init__(self, *, bucket_mb: float = 4.0):
        if not bucket_mb > 0:
            raise UsageError(f"bucket_mb={bucket_mb!r}: a size in MiB above 0 is needed, e.g. allreduce:bucket_mb=4")
        self.bucket_mb = bucket_mb

    def aggregate(self, gradients: list[Gradient]) -> list[Gradient]:
        """Returns the sum of `gradients` over all replicas (see `Hook.aggregate`)."""
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1 or not gradients:
            return gradients
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=int(self.bucket_mb * MEBIBYTE))
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, gradients, options))
