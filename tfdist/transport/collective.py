"""TensorFlow's own collectives: RING between CPU workers, NCCL between GPUs, copies within a process."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.transport.base import Request, Transport
from tfdist.transport.keys import exchange_key

_GROUP_KEY = 1_818_000  # TensorFlow counts its own groups from 1


class CollectiveTransport(Transport):
    """Whatever communication the strategy was made with.

    Between workers with one CPU replica each, the ring is entered directly. TensorFlow's way there meets in
    `merge_call`, which is forbidden within a condition, and starts each collective after the last one has ended.
    """

    name = "collective"

    def exchange(self, requests: Sequence[Request]) -> list[tf.Tensor]:
        """Returns what comes back for each request."""
        context = tf.distribute.get_replica_context()
        if enters_directly(context.strategy):
            # How many rows there are is mostly known before their values.
            counts = [_gather(tf.shape(r.buffer)[:1]) if r.kind == "rows" else None for r in requests]
            return [_directly(request, rows) for request, rows in zip(requests, counts, strict=True)]
        return [_by_strategy(context, request) for request in requests]


def enters_directly(strategy: tf.distribute.Strategy) -> bool:
    """Whether the transport needs no `merge_call`, so that it also works within a condition."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    devices = strategy.extended.worker_devices
    return len(devices) == 1 and "CPU" in devices[0] and strategy.num_replicas_in_sync > 1


def _by_strategy(context: tf.distribute.ReplicaContext, request: Request) -> tf.Tensor:
    if request.kind == "sum":
        return context.all_reduce(tf.distribute.ReduceOp.SUM, request.buffer)
    return context.all_gather(request.buffer[None] if request.kind == "gather" else request.buffer, axis=0)


def _directly(request: Request, counts: "tf.Tensor | None") -> tf.Tensor:
    buffer = request.buffer
    if request.kind == "sum":
        return tf.raw_ops.CollectiveReduceV2(
            input=buffer, merge_op="Add", final_op="Id", **_arguments("reduce", buffer)
        )
    if counts is None:
        return _gather(buffer)
    # The ring gathers equal shapes.
    missing = tf.reduce_max(counts) - tf.shape(buffer)[0]
    gathered = _gather(tf.pad(buffer, [[0, missing], *([[0, 0]] * (buffer.shape.rank - 1))]))
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return tf.concat([gathered[i, : counts[i, 0]] for i in range(replicas)], axis=0)


def _gather(buffer: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.CollectiveGatherV2(input=buffer[None], **_arguments("gather", buffer))


def _arguments(kind: str, buffer: tf.Tensor) -> dict:
    return {
        "group_size": tf.distribute.get_replica_context().num_replicas_in_sync,
        "group_key": _GROUP_KEY,
        "instance_key": exchange_key(f"{kind} {buffer.dtype.name} {buffer.shape}"),
        "ordering_token": [],
        "communication_hint": "RING",
    }
