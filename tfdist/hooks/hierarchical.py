"""Aggregation in two levels: exactly within a worker, by another hook between workers."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.base import Gradient, Hook
from tfdist.hooks.wrapping import WrappingHook
from tfdist.strategy import num_local_replicas, num_workers
from tfdist.transport import CollectiveTransport, Transport, WorkerTransport


class Hierarchical(WrappingHook):
    """Sums the gradients of a worker's replicas exactly, and lets `hook` aggregate those sums between workers.

    The first replica of each worker speaks for it, so the network carries one gradient for each worker instead of one
    for each device, and a lossy hook loses something once, between workers. State of the hook is that of the first
    replicas.

    Use it for lossy hooks where workers have several devices each, which are close to one another and far from those
    of other workers.

    Args:
        hook: any hook whose replicas agree.
    """

    def __init__(self, hook: Hook):
        if not isinstance(hook, Hook) or not hook.replicas_agree:
            name = getattr(hook, "name", type(hook).__name__)
            raise UsageError(
                f"Hierarchical: {name!r} gives no sum that all replicas agree on; "
                "give allreduce, bf16, fp16, int8, topk, powersgd, or a hook of your own with replicas_agree = True"
            )
        super().__init__(hook)
        self.transport = hook.transport

    @WrappingHook.transport.setter
    def transport(self, transport: Transport) -> None:
        """Sets what moves the sums between workers."""
        self.hook.transport = WorkerTransport() if isinstance(transport, CollectiveTransport) else transport

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns the sum of `gradients` over all replicas."""
        context = tf.distribute.get_replica_context()
        if num_local_replicas(context.strategy) == 1:
            return self.hook.aggregate(gradients, variables)
        totals = context.merge_call(_summed, args=(gradients,))
        if num_workers(context.strategy) == 1:
            return totals
        if self.transport.takes_part():
            totals = self.hook.aggregate(totals, variables)
        return context.merge_call(_first, args=(totals,))


def _summed(strategy: tf.distribute.Strategy, gradients: Sequence) -> list[Gradient]:
    """Returns the sums over this worker's replicas, on the device of the first."""
    with tf.device(strategy.extended.worker_devices[0]):
        return [_sum(strategy.experimental_local_results(gradient)) for gradient in gradients]


def _first(strategy: tf.distribute.Strategy, totals: Sequence) -> list[Gradient]:
    """Returns what the first replica holds."""
    return [strategy.experimental_local_results(total)[0] for total in totals]


def _sum(parts: Sequence[Gradient]) -> Gradient:
    if isinstance(parts[0], tf.IndexedSlices):
        values, indices = (tf.concat([getattr(p, name) for p in parts], axis=0) for name in ("values", "indices"))
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    # Not tf.add_n, whose order, and so the last bit, depends on timing.
    return parts[0] + parts[1] if len(parts) == 2 else tf.reduce_sum(tf.stack(parts), axis=0)
