"""Ends `fit` after a number of steps."""

from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.training.runner import runner_of


class StopAtStep(keras.callbacks.Callback):
    """Ends `fit` of a prepared model at exactly `step`, counted from 1 over all of its training.

    Steps that a checkpoint brought back count.

    Args:
        step: the last step.
    """

    same_on_all = True

    def __init__(self, step: int):
        super().__init__()
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise UsageError(f"step={step!r}: an integer of at least 1 is needed")
        self.step = step
        self._runner: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Tells the loop where to end."""
        self._runner = runner_of(self.model, "StopAtStep")
        self._runner.last_step = self.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks whether the step has been reached."""
        self.model.stop_training |= self._runner.steps_done >= self.step

    def on_train_end(self, logs: Any = None) -> None:
        """Lets later calls of `fit` go on."""
        self._runner.last_step = None
