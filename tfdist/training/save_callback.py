"""Checkpoints from `fit`."""

import os
from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.training.checkpoint import RESUME, Checkpoints
from tfdist.training.runner import runner_of


class SaveCheckpoints(keras.callbacks.Callback):
    """Saves checkpoints during `fit` of a prepared model, and continues from the newest one.

    Training that was stopped at any step goes on there, bit for bit as if it had not been stopped. Give it to every
    worker; the chief writes.

    Args:
        directory: where the checkpoints are.
        every: steps between checkpoints; None saves after every epoch.
        keep: how many checkpoints stay.
        resume: "auto" (continue where there is a checkpoint), "must" (or fail), "never".
        on_save_error: "stop" or "continue", where a checkpoint cannot be written.
        asynchronous: see `Checkpoints`.
    """

    same_on_all = True

    def __init__(
        self,
        directory: "str | os.PathLike",
        *,
        every: "int | None" = None,
        keep: int = 3,
        resume: str = "auto",
        on_save_error: str = "stop",
        asynchronous: bool = True,
    ):
        super().__init__()
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise UsageError(f"every={every!r}: an integer of at least 1 is needed, or None to save after every epoch")
        if resume not in RESUME:
            raise UsageError(f"resume={resume!r}: choose one of {', '.join(RESUME)}")
        self.directory = directory
        self.every = every
        self.keep = keep
        self.resume = resume
        self.on_save_error = on_save_error
        self.asynchronous = asynchronous
        self._checkpoints: Checkpoints | None = None
        self._saved_at = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest checkpoint."""
        self._runner = runner = runner_of(self.model, "SaveCheckpoints")
        self._checkpoints = Checkpoints(
            self.directory,
            self.model,
            runner.strategy,
            hook=runner.options.hook,
            keep=self.keep,
            on_error=self.on_save_error,
            asynchronous=self.asynchronous,
        )
        saved = self._checkpoints.restore(self.resume)
        if saved is not None:
            runner.resume(saved.step, saved.position, evaluation_due=saved.evaluation_due)
        self._checkpoints.prepare()
        self._saved_at = runner.steps_done
        runner.save_on_stop(self._save_last)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves where `every` steps have passed."""
        self._checkpoints.check()
        if self.every is not None and self._runner.steps_done // self.every > self._saved_at // self.every:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves after an epoch, without `every`."""
        if self.every is None:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Saves the end."""
        with self._runner.activity("save"):
            self._save_last()

    def _save_last(self) -> None:
        due = self._runner.evaluating
        if self._runner.steps_done > self._saved_at or due:
            self._checkpoints.save(self._runner.steps_done, self._runner.position, evaluation_due=due)
        self._checkpoints.wait()
        self._checkpoints.check()

    def _save(self) -> None:
        with self._runner.activity("save"):
            self._checkpoints.save(self._runner.steps_done, self._runner.position)
        self._saved_at = self._runner.steps_done
