"""How far the step at hand has come, for others to see while the compiled loop runs: see `tfdist.liveness`."""

from typing import Any

import tensorflow as tf

from tfdist.training.stamps import really_there


class Marks:
    """Two numbers in the host's memory, which the compiled step writes and another thread reads.

    They are resources without a `tf.Variable` around them, as a strategy would put one of those on every replica.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._count, self._stage = (
                tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=f"tfdist_mark_{name}_{id(self)}")
                for name in ("count", "stage")
            )
        self.reset()

    def mark(self, stage: int, after: Any = ()) -> tf.Operation:
        """Returns an operation that notes, when `after` is there, that the step has come to `stage`.

        Args:
            stage: a place in `tfdist.liveness.beat.STAGES`.
            after: tensors, nested.
        """
        with tf.control_dependencies(really_there(after)), tf.device("CPU:0"):
            stage_there = tf.raw_ops.AssignVariableOp(resource=self._stage, value=tf.constant(stage, tf.int64))
            with tf.control_dependencies([] if stage_there is None else [stage_there]):
                return tf.raw_ops.AssignAddVariableOp(resource=self._count, value=tf.constant(1, tf.int64))

    def reset(self) -> None:
        """Notes that no step is under way."""
        with tf.init_scope(), tf.device("CPU:0"):
            for resource in (self._count, self._stage):
                tf.raw_ops.AssignVariableOp(resource=resource, value=tf.constant(0, tf.int64))

    def read(self) -> tuple[int, int]:
        """Returns a count that grows with every mark, and the last stage."""
        with tf.init_scope(), tf.device("CPU:0"):  # it may be asked for while a function is traced
            count, stage = (
                int(tf.raw_ops.ReadVariableOp(resource=resource, dtype=tf.int64))
                for resource in (self._count, self._stage)
            )
        return count, stage
