"""Keras callbacks in a job of several workers: who runs which, and when all stop."""

from collections.abc import Sequence
from typing import Any

import keras

CHIEF_ONLY = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks that write; so do all with an attribute `chief_only = True`."""

SAME_ON_ALL = (
    *CHIEF_ONLY,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)
"""Callbacks that decide on the (global, equal) logs alone, so that all workers decide alike.

So do all with an attribute `same_on_all = True`.
"""


def callback_list(
    callbacks: Any,
    model: keras.Model,
    *,
    chief: bool,
    history: bool,
    verbose: int,
    epochs: int,
    steps: "int | None",
) -> keras.callbacks.CallbackList:
    """Returns the callbacks that this worker runs.

    Args:
        callbacks: what the user gave: a callback, a sequence, a `CallbackList`, or None.
        model: the model.
        chief: whether this is worker 0.
        history: add a `History`.
        verbose: 0, 1 or 2; workers other than the chief show nothing.
        epochs: for the progress bar.
        steps: for the progress bar.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if not chief:
            callbacks.callbacks[:] = [c for c in callbacks.callbacks if not writes(c)]
        return callbacks
    flat = keras.tree.flatten(callbacks) if callbacks is not None else []
    verbose = verbose if chief else 0
    return keras.callbacks.CallbackList(
        [c for c in flat if chief or not writes(c)],
        add_history=history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def writes(callback: keras.callbacks.Callback) -> bool:
    """Whether only the chief may run `callback`."""
    return isinstance(callback, CHIEF_ONLY) or getattr(callback, "chief_only", False)


def restores(callbacks: Any) -> bool:
    """Whether one of the user's `callbacks` changes the model when training begins. Equal on all workers."""
    return any(isinstance(c, keras.callbacks.BackupAndRestore) for c in _flat(callbacks))


def may_stop_alone(callbacks: Any) -> bool:
    """Whether a callback could stop training within an epoch on one worker and not on another.

    Equal on all workers. Where it is so, the workers agree after every step, which costs a small all-reduce.
    """
    base = keras.callbacks.Callback
    return any(
        not isinstance(c, SAME_ON_ALL)
        and not getattr(c, "same_on_all", False)
        and (type(c).on_train_batch_end, type(c).on_batch_end) != (base.on_train_batch_end, base.on_batch_end)
        for c in _flat(callbacks)
    )


def _flat(callbacks: Any) -> Sequence[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks is not None else []
