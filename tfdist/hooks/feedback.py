"""Error feedback: what a lossy hook left out of one step is added to the next."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.base import Gradient
from tfdist.hooks.bucketed import BucketedHook
from tfdist.hooks.state import ReplicaState, replica_state
from tfdist.hooks.wrapping import WrappingHook


class ErrorFeedback(WrappingHook):
    """Adds to each gradient what `hook` has left out of those before, on each replica by itself.

    Nothing is lost then, only late, which is what lets strong compression learn. A step whose sum is not finite leaves
    the memory as it was. It costs the memory of one more copy of the trainable variables. What stays sparse is summed
    exactly and needs none.

    Reference: Karimireddy et al., Error feedback fixes SignSGD and other gradient compression schemes, ICML 2019.

    Args:
        hook: a lossy bucketed hook.
    """

    def __init__(self, hook: BucketedHook):
        if not isinstance(hook, BucketedHook) or not hook.lossy or not hook.replicas_agree:
            raise UsageError(
                f"ErrorFeedback: {getattr(hook, 'name', type(hook).__name__)!r} is no lossy hook that tells what it "
                "sends; give bf16, fp16, int8, topk, powersgd, or a BucketedHook with lossy = True"
            )
        super().__init__(hook)
        self._memory: dict[int, ReplicaState] = {}

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the memory: zeros like every variable with floating-point gradients."""
        super().build(variables)
        self._memory = {
            id(v): replica_state(tf.zeros(v.shape, v.dtype), shared=False, name=f"left_out_{i}")
            for i, v in enumerate(variables)
        }

    @property
    def state(self) -> list[ReplicaState]:
        """The memory, and the state of the hook within."""
        return [*super().state, *self._memory.values()]

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns the sum of the gradients and of what was left out before."""
        if self.transport.participants() == 1:
            return gradients
        gradients = self.hook.smallest(gradients, variables)
        memory = [self._memory[id(v)].variable for v in variables]
        complete = [
            g + tf.cast(tf.convert_to_tensor(m), g.dtype) if isinstance(g, tf.Tensor) else g
            for g, m in zip(gradients, memory, strict=True)
        ]
        totals, own = self.hook.exchange(complete, variables)
        # Sums are equal on all replicas, so all of them keep the old memory or none does.
        dense = [total for total in totals if isinstance(total, tf.Tensor)]
        sound = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in dense])
        for whole, sent, left in zip(complete, own, memory, strict=True):
            if isinstance(whole, tf.Tensor) and isinstance(sent, tf.Tensor):
                left.assign(tf.where(sound, tf.cast(whole - sent, left.dtype), tf.convert_to_tensor(left)))
        return totals
