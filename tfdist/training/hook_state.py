"""A hook's state in checkpoints: what every replica holds, in one place and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.hooks import ReplicaState
from tfdist.strategy import num_local_replicas, worker_index


class StateGatherer:
    """Collects what every replica of the job holds, in a function that is traced once.

    Args:
        strategy: the strategy.
        states: the state of a hook that has been built.
    """

    def __init__(self, strategy: tf.distribute.Strategy, states: Sequence[ReplicaState]):
        self._strategy = strategy
        self._states = list(states)
        self._apart = [state.variable for state in states if not state.shared]
        self._gather = tf.function(self._on_replicas, autograph=False)

    def values(self) -> list[np.ndarray]:
        """Returns the value of each state: what is shared as it is, else one row for each replica of the job.

        Every worker has to call it.
        """
        rows = iter(self._rows())
        return [_local(self._strategy, state)[0].numpy() if state.shared else next(rows) for state in self._states]

    def _rows(self) -> list[np.ndarray]:
        if self._apart and self._strategy.num_replicas_in_sync > 1:
            return [value.numpy() for value in self._gather()]
        return [self._strategy.experimental_local_results(v)[0].numpy()[None] for v in self._apart]

    def _on_replicas(self) -> list[tf.Tensor]:
        def on_replica() -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            return [context.all_gather(tf.convert_to_tensor(v)[None], axis=0) for v in self._apart]

        values = self._strategy.run(on_replica)
        return [self._strategy.experimental_local_results(value)[0] for value in values]


def restore_state(strategy: tf.distribute.Strategy, state: ReplicaState, saved: np.ndarray) -> None:
    """Sets this process's copies of `state` to what `StateGatherer` gave.

    Parts of a sum that another number of replicas has saved are shared out evenly: their sum stays.
    """
    replicas, local = strategy.num_replicas_in_sync, num_local_replicas(strategy)
    if not state.shared and len(saved) != replicas:
        saved = np.repeat(saved.sum(axis=0, keepdims=True) / replicas, replicas, axis=0)
    first = worker_index(strategy) * local
    for i, copy in enumerate(_local(strategy, state)):
        copy.assign(saved if state.shared else saved[first + i])


def saved_shape(state: ReplicaState) -> list["int | None"]:
    """Returns the shape that a saved value has, with None for the number of replicas."""
    shape = state.variable.shape.as_list()
    return shape if state.shared else [None, *shape]


def _local(strategy: tf.distribute.Strategy, state: ReplicaState) -> Sequence[Any]:
    return strategy.experimental_local_results(state.variable)
