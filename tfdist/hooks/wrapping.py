"""The base of hooks that put something around another hook."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.hooks.base import Hook, HookReport
from tfdist.hooks.state import ReplicaState
from tfdist.transport import Transport


class WrappingHook(Hook):
    """Passes everything on to the hook within; a subclass says what it does otherwise, `aggregate` at least.

    Args:
        hook: the hook within; its name and promises are those of this one.
    """

    def __init__(self, hook: Hook):
        self.hook = hook
        self.name = hook.name
        self.lossy = hook.lossy
        self.replicas_agree = hook.replicas_agree

    @property
    def sends_after_update(self) -> bool:
        """Whether the hook within does."""
        return self.hook.sends_after_update

    @property
    def transport(self) -> Transport:
        """The transport of the hook within."""
        return self.hook.transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self.hook.transport = transport

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state of the hook within."""
        self.hook.build(variables)

    def tune(self, strategy: tf.distribute.Strategy, agree: Callable[[int], int]) -> None:
        """Lets the hook within measure the link."""
        self.hook.tune(strategy, agree)

    @property
    def state(self) -> list[ReplicaState]:
        """The state of the hook within."""
        return self.hook.state

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        """Tells the hook within."""
        self.hook.after_update(variables)

    @property
    def report(self) -> "HookReport | None":
        """That of the hook within."""
        return self.hook.report
