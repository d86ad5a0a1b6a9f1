"""The interface of a gradient-aggregation hook."""

import abc
from collections.abc import Sequence

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


class Hook(abc.ABC):
    """Aggregates one step's gradients over all replicas.

    A hook is called once a step, on every replica, in replica context, with that replica's share of the
    gradients; it returns their sum over all replicas (exactly, or as close as the hook promises). Clipping,
    loss scaling and the optimizer come after it and see only what it returns.
    """

    name: str = "hook"

    def build(self, variables: Sequence[tf.Variable]) -> None:  # noqa: B027, most hooks have no state
        """Creates the hook's state. Called once, under the strategy's scope, before the first step.

        Args:
            variables: the trainable variables whose gradients `aggregate` will get, in that order.
        """

    @property
    def variables(self) -> list[tf.Variable]:
        """The hook's state, saved in and restored from checkpoints. Empty for a hook without state."""
        return []

    @abc.abstractmethod
    def aggregate(self, gradients: list[Gradient]) -> list[Gradient]:
        """Returns the sum of `gradients` over all replicas.

        Args:
            gradients: this replica's gradients, none of them None; `tf.IndexedSlices` for sparse ones.

        Returns:
            As many gradients with the same shapes and dtypes, equal on every replica.
        """
