"""Runs hooks on given gradients, without a model."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest


class Bench:
    """Feeds gradients to a hook under a strategy.

    Args:
        strategy: the strategy.
        hook: the hook.
        shapes: of the variables.
    """

    def __init__(self, strategy: Any, hook: Any, shapes: Sequence[tuple[int, ...]]):
        import keras
        import tensorflow as tf

        self.strategy = strategy
        self.hook = hook
        with strategy.scope():
            self.variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
            hook.build(self.variables)
        specs = [tf.TensorSpec([strategy.num_replicas_in_sync, *shape]) for shape in shapes]

        @tf.function(input_signature=[specs], autograph=False)
        def aggregate(gradients: list) -> list:
            def on_replica() -> list:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                return hook.aggregate([g[replica] for g in gradients], self.variables)

            return strategy.run(on_replica)

        self._aggregate = aggregate

    def sums(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what the hook makes of `gradients`, each of shape (replicas, ...), after a look at all replicas."""
        found = []
        for total in self._aggregate([np.asarray(g, "float32") for g in gradients]):
            first, *others = [part.numpy() for part in self.strategy.experimental_local_results(total)]
            for other in others:
                np.testing.assert_array_equal(other, first)
            found.append(first)
        return found

    def states(self) -> list[np.ndarray]:
        """Returns the state of every replica, of shape (replicas, ...)."""
        return [
            np.stack([part.numpy() for part in self.strategy.experimental_local_results(state.variable)])
            for state in self.hook.state
        ]


@pytest.fixture
def bench(strategies: dict[str, Any]) -> Callable[..., Bench]:
    """Makes a `Bench` for a hook or its spec."""
    import tfdist

    def make(hook: Any, shapes: Sequence[tuple[int, ...]], on: str = "mirrored2") -> Bench:
        return Bench(strategies[on], tfdist.hooks.parse(hook), shapes)

    return make
