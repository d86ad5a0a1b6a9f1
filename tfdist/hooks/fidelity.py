"""How faithful a lossy hook is: its sum next to the exact one, every few steps."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.allreduce import AllReduce
from tfdist.hooks.base import Gradient, Hook, HookReport, whole_number
from tfdist.hooks.choice import either
from tfdist.hooks.hierarchical import Hierarchical
from tfdist.hooks.state import GroupValue, ReplicaState
from tfdist.hooks.wrapping import WrappingHook


class Fidelity(WrappingHook):
    """Compares the sum that `hook` gives with the exact one, every `every` steps; `report` tells what was found.

    Between workers only the steps that are looked at pay for the exact sum. Replicas of one process do at every step.

    Args:
        hook: any hook that returns sums.
        every: steps between two looks; the first step is one.
    """

    def __init__(self, hook: Hook, *, every: int = 100):
        if not isinstance(hook, Hook):
            raise UsageError(f"Fidelity: {hook!r} is no hook")
        if isinstance(hook, Hierarchical):
            raise UsageError("Fidelity: a Hierarchical hook loses something between workers; wrap the hook within")
        super().__init__(hook)
        self.every = whole_number("every", every, least=1)
        self._exact = AllReduce()
        self._values: dict[str, GroupValue] = {}
        self._groups: dict[int, Sequence[keras.Variable]] = {}

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the counter and the last values found."""
        super().build(variables)
        self._values = {
            "step": GroupValue(variables, tf.constant(0, tf.int64), name="fidelity_step"),
            "cosine": GroupValue(variables, tf.constant(float("nan")), name="fidelity_cosine"),
            "error": GroupValue(variables, tf.constant(float("nan")), name="fidelity_error"),
        }

    @property
    def state(self) -> list[ReplicaState]:
        """The counter, the last values, and the state of the hook within."""
        return [*super().state, *(value.state for value in self._values.values())]

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns the sum that the hook within gives."""
        totals = self.hook.aggregate(gradients, variables)
        if self.transport.participants() == 1:
            return totals
        step = self._values["step"].get(variables)
        self._values["step"].set(variables, step + 1)
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor) and isinstance(totals[i], tf.Tensor)]
        if dense:
            before = [self._values[name].get(variables) for name in ("cosine", "error")]

            self._exact.transport = self.transport

            def look() -> list[tf.Tensor]:
                exact = self._exact.aggregate([gradients[i] for i in dense], [variables[i] for i in dense])
                return _compared([totals[i] for i in dense], exact)

            found = either(step % self.every == 0, look, lambda: before, self.transport)
            for name, value in zip(("cosine", "error"), found, strict=True):
                self._values[name].set(variables, value)
            self._groups[id(variables[0])] = variables
        return totals

    @property
    def report(self) -> "HookReport | None":
        """That of the hook within, with the last values found; the mean where there are several optimizers."""
        inner = super().report
        if inner is None or not self._groups:
            return inner
        found = {}
        for name in ("cosine", "error"):
            local = tf.distribute.get_strategy().experimental_local_results(self._values[name].state.variable)
            places = [self._values[name].place(group) for group in self._groups.values()]
            found[name] = float(tf.reduce_mean(tf.gather(tf.convert_to_tensor(local[0]), places)))
        return HookReport(inner.bytes_per_step, inner.dense_bytes_per_step, found["cosine"], found["error"])


def _compared(found: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the cosine similarity and the relative error of all tensors together."""

    def dot(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> tf.Tensor:
        pairs = zip(first, second, strict=True)
        return tf.add_n([tf.reduce_sum(tf.cast(a, tf.float32) * tf.cast(b, tf.float32)) for a, b in pairs])

    norm = tf.sqrt(dot(exact, exact))
    difference = [a - b for a, b in zip(found, exact, strict=True)]
    cosine = tf.math.divide_no_nan(dot(found, exact), tf.sqrt(dot(found, found)) * norm)
    return [cosine, tf.math.divide_no_nan(tf.sqrt(dot(difference, difference)), norm)]
