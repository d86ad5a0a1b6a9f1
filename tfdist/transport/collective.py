"""TensorFlow's own collectives: RING between CPU workers, NCCL between GPUs, copies within a process."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategy import num_local_replicas, num_workers
from tfdist.transport.base import Request, Transport
from tfdist.transport.keys import MOST_KEYS, exchange_key

_REPLICAS_KEY, _WORKERS_KEY = 1_818_000, 1_818_001  # TensorFlow counts its own groups from 1
_ROW_KEYS, _SPREAD = 2_097_143, 1_021  # for exchanges whose number of rows changes; primes, whose product fits


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
            return _directly(requests, _Group(_REPLICAS_KEY, context.num_replicas_in_sync, "RING"))
        return [_by_strategy(context, request) for request in requests]

    def may_branch(self) -> bool:
        """Whether no exchange meets in `merge_call`."""
        return enters_directly(tf.distribute.get_strategy())


class WorkerTransport(Transport):
    """Collectives between workers, each represented by the first of its replicas."""

    name = "collective"

    def exchange(self, requests: Sequence[Request]) -> list[tf.Tensor]:
        """Returns what comes back for each request."""
        strategy = tf.distribute.get_strategy()
        hint = "RING" if "CPU" in strategy.extended.worker_devices[0] else "AUTO"
        return _directly(requests, _Group(_WORKERS_KEY, num_workers(strategy), hint))

    def participants(self) -> int:
        """Returns how many workers there are."""
        return num_workers(tf.distribute.get_strategy())

    def takes_part(self) -> bool:
        """Whether this is the first replica of its worker."""
        context = tf.distribute.get_replica_context()
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        return replica % num_local_replicas(context.strategy) == 0


def enters_directly(strategy: tf.distribute.Strategy) -> bool:
    """Whether the transport needs no `merge_call`, so that it also works within a condition."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    devices = strategy.extended.worker_devices
    return len(devices) == 1 and "CPU" in devices[0] and strategy.num_replicas_in_sync > 1


@dataclasses.dataclass(frozen=True)
class _Group:
    key: int
    size: int
    hint: str


def _by_strategy(context: tf.distribute.ReplicaContext, request: Request) -> tf.Tensor:
    if request.kind == "sum":
        return context.all_reduce(tf.distribute.ReduceOp.SUM, request.buffer)
    return context.all_gather(request.buffer[None] if request.kind == "gather" else request.buffer, axis=0)


def _directly(requests: Sequence[Request], group: _Group) -> list[tf.Tensor]:
    # How many rows there are is mostly known before their values.
    counts = [_gather(tf.shape(r.buffer)[:1], group) if r.kind == "rows" else None for r in requests]
    results = []
    for request, rows in zip(requests, counts, strict=True):
        if request.kind == "sum":
            results.append(_sum(request.buffer, group))
        elif rows is None:
            results.append(_gather(request.buffer, group))
        else:
            results.append(_rows(request.buffer, rows, group))
    return results


def _sum(buffer: tf.Tensor, group: _Group) -> tf.Tensor:
    arguments = _arguments("reduce", buffer, group)
    return tf.raw_ops.CollectiveReduceV2(input=buffer, merge_op="Add", final_op="Id", **arguments)


def _gather(buffer: tf.Tensor, group: _Group, rows: "tf.Tensor | None" = None) -> tf.Tensor:
    return tf.raw_ops.CollectiveGatherV2(input=buffer[None], **_arguments("gather", buffer, group, rows))


def _rows(buffer: tf.Tensor, counts: tf.Tensor, group: _Group) -> tf.Tensor:
    """Returns the rows of all; as collectives gather equal shapes, they are filled up and cut."""
    most = tf.reduce_max(counts)
    missing = most - tf.shape(buffer)[0]
    gathered = _gather(tf.pad(buffer, [[0, missing], *([[0, 0]] * (buffer.shape.rank - 1))]), group, rows=most)
    return tf.concat([gathered[i, : counts[i, 0]] for i in range(group.size)], axis=0)


def _arguments(kind: str, buffer: tf.Tensor, group: _Group, rows: "tf.Tensor | None" = None) -> dict:
    key = exchange_key(f"{group.key} {kind} {buffer.dtype.name} {buffer.shape}")
    if rows is not None:
        # TensorFlow remembers the shape that it has seen with a key: another number of rows needs another one.
        key = MOST_KEYS + (key % _ROW_KEYS + rows % _ROW_KEYS * _SPREAD) % _ROW_KEYS
    return {
        "group_size": group.size,
        "group_key": group.key,
        "instance_key": key,
        "ordering_token": [],
        "communication_hint": group.hint,
    }
