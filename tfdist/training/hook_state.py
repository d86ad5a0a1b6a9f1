"""A hook's state in checkpoints: what every replica holds, in one place and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.hooks import ReplicaState
from tfdist.strategy import num_local_replicas, worker_index


def gathered_state(strategy: tf.distribute.Strategy, states: Sequence[ReplicaState]) -> list[np.ndarray]:
    """Returns the value of each state: what is shared as it is, else one row for each replica of the job.

    Every worker has to call it.
    """
    apart = [state.variable for state in states if not state.shared]
    rows = iter(_rows(strategy, apart))
    return [_local(strategy, state)[0].numpy() if state.shared else next(rows) for state in states]


def restore_state(strategy: tf.distribute.Strategy, state: ReplicaState, saved: np.ndarray) -> None:
    """Sets this process's copies of `state` to what `gathered_state` gave.

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


def _rows(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> list[np.ndarray]:
    if not variables:
        return []
    if strategy.num_replicas_in_sync == 1:
        return [strategy.experimental_local_results(v)[0].numpy()[None] for v in variables]

    @tf.function(autograph=False)
    def gather() -> list[tf.Tensor]:
        def on_replica() -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            return [context.all_gather(tf.convert_to_tensor(v)[None], axis=0) for v in variables]

        values = strategy.run(on_replica)
        return [strategy.experimental_local_results(value)[0] for value in values]

    return [value.numpy() for value in gather()]
