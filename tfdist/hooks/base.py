"""The interface of a gradient-aggregation hook."""

import abc
import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.state import ReplicaState
from tfdist.transport import CollectiveTransport, Transport

Gradient = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class HookReport:
    """What a hook costs and loses.

    Attributes:
        bytes_per_step: what one replica sends in a step; sparse gradients count where their rows are known.
        dense_bytes_per_step: what it would send as an exact all-reduce of dense gradients.
        cosine: cosine similarity of the last sampled sum with the exact one; None where none was sampled.
        relative_error: norm of the difference from the exact sum over its norm; None where none was sampled.
    """

    bytes_per_step: int
    dense_bytes_per_step: int
    cosine: "float | None" = None
    relative_error: "float | None" = None

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes travel than with an exact all-reduce."""
        return self.dense_bytes_per_step / self.bytes_per_step if self.bytes_per_step else float("inf")


def whole_number(name: str, value: float, *, least: int, example: str = "") -> int:
    """Returns `value`, which a spec gives as a float, as an int.

    Raises:
        UsageError: naming `name`, where it is none of at least `least`.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not float(value).is_integer() or value < least:
        raise UsageError(f"{name}={value!r}: an integer of at least {least} is needed{example and f', e.g. {example}'}")
    return int(value)


class Hook(abc.ABC):
    """Aggregates one step's gradients over all replicas.

    A hook is called on every replica, in replica context, with that replica's share of the gradients; it returns
    their sum over all replicas (exactly, or as close as the hook promises). Clipping, loss scaling and the optimizer
    come after it and see only what it returns. A value that is not finite on one replica has to come out not finite on
    all of them, so that they skip the step together.

    Attributes:
        name: how a spec names it.
        lossy: whether the sum is not exact.
        replicas_agree: whether all replicas get the same sum, and so decide alike.
        sends_after_update: whether `after_update` communicates.
        transport: moves the buffers.
    """

    name: str = "hook"
    lossy: bool = False
    replicas_agree: bool = True
    sends_after_update: bool = False

    def __init__(self):
        self.transport: Transport = CollectiveTransport()

    def build(self, variables: Sequence[keras.Variable]) -> None:  # noqa: B027, most hooks have no state
        """Creates the hook's state. Called once, under the strategy's scope, before the first step.

        Args:
            variables: the trainable variables.
        """

    def tune(self, strategy: tf.distribute.Strategy, agree: Callable[[int], int]) -> None:  # noqa: B027
        """Measures what it wants to know of the link, before the first step; most hooks want nothing.

        Args:
            strategy: the strategy.
            agree: returns the chief's value on every worker.
        """

    @property
    def state(self) -> list[ReplicaState]:
        """The hook's state, saved in and restored from checkpoints."""
        return []

    @abc.abstractmethod
    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns the sum of `gradients` over all replicas.

        Args:
            gradients: this replica's gradients; `tf.IndexedSlices` for sparse ones.
            variables: the variables that they belong to, some or all of those that `build` was given.

        Returns:
            As many gradients with the same shapes and dtypes, equal on every replica.
        """

    def after_update(self, variables: Sequence[keras.Variable]) -> None:  # noqa: B027, most hooks do nothing
        """Is called in replica context after the optimizer has updated `variables`."""

    @property
    def report(self) -> "HookReport | None":
        """What the hook costs and loses, once a step was traced; None where it does not tell."""
        return None
