"""State that every replica of a hook has for itself."""

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ReplicaState:
    """A variable of which every replica has a copy that only it reads and writes.

    Attributes:
        variable: assigned in replica context.
        shared: the copies are equal on all replicas. Otherwise they are parts of a sum: at another number of replicas
            each gets an equal part of it.
    """

    variable: tf.Variable
    shared: bool


def replica_state(initial: tf.Tensor, *, shared: bool, name: str) -> ReplicaState:
    """Returns new state that is `initial` on every replica; call it under the strategy's scope."""
    variable = tf.Variable(
        initial,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    return ReplicaState(variable, shared)


class GroupValue:
    """One number, equal on all replicas, for each group of variables that an optimizer updates.

    A model's own step may have several optimizers, whose steps are counted apart. A group goes by its first variable.

    Args:
        variables: all trainable variables.
        initial: what every group begins with.
        name: of the variable.
    """

    def __init__(self, variables: Sequence[keras.Variable], initial: tf.Tensor, *, name: str):
        self._places = {id(variable): i for i, variable in enumerate(variables)}
        self.state = replica_state(tf.repeat(initial, max(1, len(variables))), shared=True, name=name)

    def get(self, group: Sequence[keras.Variable]) -> tf.Tensor:
        """Returns the number of `group`, a scalar."""
        return tf.convert_to_tensor(self.state.variable)[self.place(group)]

    def set(self, group: Sequence[keras.Variable], value: tf.Tensor) -> None:
        """Sets the number of `group`."""
        values = tf.convert_to_tensor(self.state.variable)
        self.state.variable.assign(tf.tensor_scatter_nd_update(values, [[self.place(group)]], [value]))

    def place(self, group: Sequence[keras.Variable]) -> int:
        """Returns where in the state the number of `group` is."""
        return self._places[id(group[0])]
