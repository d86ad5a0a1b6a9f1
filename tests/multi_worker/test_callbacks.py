"""Keras's callbacks on two workers: who writes, and that all workers leave at the same step."""

import contextlib
import csv
import io

import keras
import numpy as np
import tensorflow as tf

from tests.multi_worker.harness import on_workers
from tests.multi_worker.models import classifier, labelled, outcome, regression, regressor


@on_workers(2)
def test_early_stopping(job):
    """The workers' own parts of the validation data would tell them to stop in different epochs."""
    x, y = regression(12)
    val_x, val_y = regression(8, seed=50)
    val_y = val_y + np.where(np.arange(8) % 4 < 2, 0.0, 9.0).astype("float32")[:, None]  # worker 1 has the hard ones
    model = regressor(job)
    stopping = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=30,
        shuffle=False,
        verbose=0,
        validation_data=(val_x, val_y),
        validation_batch_size=4,
        callbacks=[stopping],
    )
    assert 0 < stopping.stopped_epoch < 29, stopping.stopped_epoch
    return outcome(model, history, stopped=stopping.stopped_epoch, best=stopping.best_epoch)


@on_workers(2)
def test_reduce_learning_rate_on_plateau(job):
    x, y = regression(12)
    model = regressor(job)
    reduce = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.05)
    history = model.fit(x, y, batch_size=5, epochs=12, shuffle=False, verbose=0, callbacks=[reduce])
    assert float(np.asarray(model.optimizer.learning_rate)) < 0.1
    return outcome(model, history)


@on_workers(2)
def test_learning_rate_schedules(job):
    x, y = regression(12)
    model = regressor(job)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))
    history = model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0, callbacks=[schedule])
    decaying = regressor(job, lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 6)))
    second = decaying.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    return outcome(model, history, decaying=decaying.get_weights(), second=second.history)


class StopOnOneWorker(keras.callbacks.Callback):
    """Worker 1 alone wants to stop, after the third step of the second epoch."""

    def __init__(self, job):
        super().__init__()
        self.job, self.epoch, self.steps = job, 0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.job.index == 1 and self.epoch == 1 and batch == 2:
            self.model.stop_training = True


@on_workers(2, stock=False)
def test_stop_on_one_worker_within_an_epoch(job):
    x, y = regression(20)
    model = regressor(job)
    stop = StopOnOneWorker(job)
    model.fit(x, y, batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=[stop])
    assert stop.steps == 5 + 3, stop.steps
    assert int(model.optimizer.iterations.numpy()) == 8
    return outcome(model)


@on_workers(2, stock=False)
def test_stop_on_one_worker_at_the_end_of_an_epoch(job):
    x, y = regression(20)
    model = regressor(job)
    ended = []

    def stop(epoch, logs):
        ended.append(epoch)
        if job.index == 1 and epoch == 1:
            model.stop_training = True

    callback = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=[callback])
    assert ended == [0, 1], ended
    return outcome(model)


@on_workers(2)
def test_writers_write_once(job):
    x, y = labelled(12)
    model = classifier(job)
    table, logs = job.folder / "table.csv", job.folder / "logs"
    kept = job.folder / "kept-{epoch}.weights.h5"
    callbacks = [
        keras.callbacks.CSVLogger(str(table)),
        keras.callbacks.TensorBoard(str(logs), update_freq="epoch"),
        keras.callbacks.ModelCheckpoint(str(kept), save_weights_only=True),
        keras.callbacks.ModelCheckpoint(str(job.folder / "model.keras"), save_best_only=True, monitor="loss"),
    ]
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    model.evaluate(x, y, verbose=0)  # all workers: the chief has written when this ends
    with open(table) as stream:
        lines = list(csv.DictReader(stream))
    np.testing.assert_allclose([float(line["loss"]) for line in lines], history.history["loss"], rtol=1e-6)
    assert len(list(logs.rglob("*tfevents*"))) == len(list(logs.iterdir())), list(logs.rglob("*"))
    files = sorted(path.name for path in job.folder.iterdir())
    with job.scope():
        loaded = keras.models.load_model(job.folder / "model.keras")
    same = [np.allclose(a, b) for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True)]
    assert all(same), same
    loaded = job.prepare(loaded)
    more = loaded.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return outcome(model, history, files=files, more=more.history, epochs=[line["epoch"] for line in lines])


@on_workers(2, stock=False)
def test_progress_is_shown_by_the_chief_only(job):
    x, y = regression(12)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        regressor(job).fit(x, y, batch_size=4, epochs=1, verbose=2)
    assert bool(shown.getvalue()) == job.chief, shown.getvalue()


class Crash(Exception):
    """Ends a training in the middle."""


class CrashAt(keras.callbacks.Callback):
    """Raises on every worker at the beginning of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Crash


@on_workers(2)
def test_backup_and_restore_goes_on_at_the_right_epoch(job):
    """A second training with the same folder begins in epoch 2, with the same weights on all workers."""
    x, y = regression(12)
    backup = job.folder / "backup"

    def train(crash_at, expected_epochs):
        model = regressor(job)
        begun = []
        callbacks = [
            keras.callbacks.BackupAndRestore(str(backup), delete_checkpoint=False),
            keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch)),
            CrashAt(crash_at),
        ]
        with contextlib.suppress(Crash):
            model.fit(x, y, batch_size=5, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
        assert begun == expected_epochs, begun
        return model

    train(crash_at=2, expected_epochs=[0, 1, 2])
    model = train(crash_at=99, expected_epochs=[2, 3])
    unbroken = regressor(job)
    unbroken.fit(x, y, batch_size=5, epochs=4, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), unbroken.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    return {"weights": model.get_weights(), "history": model.history.history}


@on_workers(2, stock=False)
def test_own_callback_marked_as_chief_only(job):
    x, y = regression(8)
    calls = []

    class Writer(keras.callbacks.Callback):
        chief_only = True

        def on_epoch_end(self, epoch, logs=None):
            calls.append(epoch)

    regressor(job).fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Writer()])
    assert calls == ([0, 1] if job.chief else []), calls


@on_workers(2)
def test_validation_frequency_and_logs_of_batches(job):
    """Callbacks are told the global logs of each batch, on every worker."""
    x, y = labelled(14)
    model = classifier(job)
    batches, epochs = [], []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append({k: float(v) for k, v in logs.items()}),
        on_epoch_end=lambda epoch, logs: epochs.append(dict(logs)),
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    model.fit(data, epochs=4, verbose=0, validation_data=data, validation_freq=2, callbacks=[callback])
    return outcome(model, batches=batches, epochs=epochs)
