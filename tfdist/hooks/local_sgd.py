"""Local SGD: replicas train by themselves and average their weights now and then."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.hooks.base import Gradient, whole_number
from tfdist.hooks.bucketed import AUTO, BucketedHook
from tfdist.hooks.choice import either
from tfdist.hooks.message import Message
from tfdist.hooks.noop import times
from tfdist.hooks.state import GroupValue, ReplicaState


class LocalSGD(BucketedHook):
    """Updates every replica with its own gradients, and averages the weights every `period` steps.

    Momentum and all other state of the optimizer stay local: they are neither sent nor reset, as averages over time
    they forget where they began. A checkpoint holds the chief's, which a resumed run takes over. Between two averages
    the replicas differ, so evaluate and save after a multiple of `period` steps. With SGD and period=1 it is the
    exact all-reduce.

    Use it where even compressed gradients are too much for the link. Reference: Stich, Local SGD converges fast and
    communicates little, ICLR 2019; Lin et al., Don't use large mini-batches, use local SGD, ICLR 2020 (start_step).

    Args:
        period: steps between two averages.
        start_step: steps with exact aggregation at first.
        bucket_mb: see `BucketedHook`.
    """

    name = "local_sgd"
    lossy = True
    replicas_agree = False
    sends_after_update = True

    def __init__(self, *, period: int = 8, start_step: int = 0, bucket_mb: "float | str" = AUTO):
        super().__init__(bucket_mb=bucket_mb)
        self.period = whole_number("period", period, least=1, example="local_sgd:period=8")
        self.start_step = whole_number("start_step", start_step, least=0, example="local_sgd:period=8")
        self._step: GroupValue | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the step counter."""
        self._step = GroupValue(variables, tf.constant(0, tf.int64), name="local_sgd_step")

    @property
    def state(self) -> list[ReplicaState]:
        """The counter, equal on all replicas."""
        return [self._step.state]

    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Returns what travels for the exact sum; see `BucketedHook.encode`."""
        return Message.exact(buffer)

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns this replica's gradients as if all replicas had the same, or the exact sums until `start_step`."""
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        if replicas == 1 or not self.start_step:
            return [times(g, replicas) for g in gradients]
        dense = [tf.convert_to_tensor(g) for g in gradients]
        exactly = super().aggregate
        begun = self._step.get(variables) >= self.start_step
        return either(
            begun, lambda: [times(g, replicas) for g in dense], lambda: exactly(dense, variables), self.transport
        )

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        """Counts the step, and averages the weights where it is time."""
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            return
        step = self._step.get(variables) + 1
        self._step.set(variables, step)
        due = (step % self.period == 0) & (step >= self.start_step)
        values = [tf.convert_to_tensor(v.value) for v in variables]
        replicas = context.num_replicas_in_sync
        averages = either(
            due, lambda: self.sum_exactly([v / replicas for v in values])[0], lambda: values, self.transport
        )
        sent = sum(self.dense_bytes(v) for v in variables)
        self._costs[tuple(id(v) for v in variables)] = (sent // self.period, sent)

        def assign(strategy: tf.distribute.Strategy, due: tf.Tensor, averages: list) -> None:
            for variable, average in zip(variables, averages, strict=True):
                strategy.extended.update(variable.value, _assigned, args=(due, average), group=False)

        context.merge_call(assign, args=(due, averages))


def _assigned(variable: tf.Variable, due: tf.Tensor, average: tf.Tensor) -> None:
    def assign() -> tf.Tensor:
        variable.assign(average)
        return tf.constant(0)

    tf.cond(due, assign, lambda: tf.constant(0))
