"""TensorFlow's own collectives: RING between CPU workers, NCCL between GPUs, copies within a process."""

import weakref
import zlib

import tensorflow as tf

from tfdist.transport.base import Transport

_GROUP_KEY = 1_818_000  # TensorFlow counts its own groups from 1


class CollectiveTransport(Transport):
    """Whatever communication the strategy was made with.

    Between workers with one CPU replica each, the ring is entered directly. TensorFlow's way there meets in
    `merge_call`, which is forbidden within a condition, and starts each collective after the last one has ended.
    """

    name = "collective"

    def all_reduce(self, buffer: tf.Tensor) -> tf.Tensor:
        """Returns the sum of `buffer` over all replicas."""
        context = tf.distribute.get_replica_context()
        if not enters_directly(context.strategy):
            return context.all_reduce(tf.distribute.ReduceOp.SUM, buffer)
        return tf.raw_ops.CollectiveReduceV2(
            input=buffer, merge_op="Add", final_op="Id", **_arguments(context, "reduce", buffer)
        )

    def all_gather(self, buffer: tf.Tensor) -> tf.Tensor:
        """Returns `buffer` of every replica, one row each."""
        context = tf.distribute.get_replica_context()
        if not enters_directly(context.strategy):
            return context.all_gather(buffer[None], axis=0)
        return tf.raw_ops.CollectiveGatherV2(input=buffer[None], **_arguments(context, "gather", buffer))


def enters_directly(strategy: tf.distribute.Strategy) -> bool:
    """Whether the transport needs no `merge_call`, so that it also works within a condition."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    devices = strategy.extended.worker_devices
    return len(devices) == 1 and "CPU" in devices[0] and strategy.num_replicas_in_sync > 1


def _arguments(context: tf.distribute.ReplicaContext, kind: str, buffer: tf.Tensor) -> dict:
    return {
        "group_size": context.num_replicas_in_sync,
        "group_key": _GROUP_KEY,
        "instance_key": _instance_key(f"{kind} {buffer.dtype.name} {buffer.shape}"),
        "ordering_token": [],
        "communication_hint": "RING",
    }


_taken: "weakref.WeakKeyDictionary[tf.Graph, set[int]]" = weakref.WeakKeyDictionary()


def _instance_key(what: str) -> int:
    """Returns what names a collective on all workers: it has to be equal on them and unlike all that run beside it.

    It comes from what is exchanged and how often that stands in the function being traced, not from how many
    were traced before, so workers may trace other functions in between.
    """
    if tf.executing_eagerly():
        return zlib.crc32(what.encode()) & 0x3FFFFFFF
    taken = _taken.setdefault(_outermost(tf.compat.v1.get_default_graph()), set())
    key = zlib.crc32(what.encode()) & 0x3FFFFFFF
    while key in taken:
        key = (key + 1) & 0x3FFFFFFF
    taken.add(key)
    return key


def _outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph of the whole function, where `graph` is that of a branch or of a loop's body within it."""
    outer = getattr(graph, "outer_graph", None)
    return _outermost(outer) if getattr(outer, "building_function", False) else graph
