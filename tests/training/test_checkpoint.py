"""Checkpoints: resumed training equals the unbroken one bit for bit, and nothing damaged or foreign is used or lost."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.data import ArraySource, Position
from tfdist.errors import SaveError, UsageError
from tfdist.training import checkpoint as checkpoint_module
from tfdist.training import checkpoint_files
from tfdist.training.checkpoint import Checkpoints, newest_checkpoint, require_checkpoint
from tfdist.training.save_callback import SaveCheckpoints


def data(rows=23):
    rng = np.random.default_rng(4)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def build(optimizer=None):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.03, use_ema=True, ema_overwrite_frequency=3), "mse")
    return model


def made(strategy, seed=5, **options):
    with strategy.scope():
        keras.utils.set_random_seed(seed)
        model = build(**options)
    return tfdist.prepare(model)


def state_of(model):
    """Returns all that a step reads or writes, seeds too."""
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    variables = [v for v in model.variables if id(v) not in metrics] + list(model.optimizer.variables)
    return [v.numpy() for v in variables]


def assert_equal_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


class StopAt(keras.callbacks.Callback):
    """Ends `fit` after some steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left == 0


def fit(model, folder=None, stop=None, epochs=4, **options):
    x, y = data()
    callbacks = [SaveCheckpoints(folder, **options)] if folder else []
    callbacks += [StopAt(stop)] if stop else []
    return model.fit(x, y, batch_size=5, epochs=epochs, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize("name", ["one_device", "mirrored2", pytest.param("mirrored3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [3, 5, 12], ids=["in the first epoch", "between epochs", "in a later epoch"])
def test_fit_goes_on_bit_for_bit(strategies, tmp_path, name, stop):
    unbroken = made(strategies[name])
    fit(unbroken)
    first = made(strategies[name])
    fit(first, tmp_path, stop=stop)
    assert newest_checkpoint(tmp_path).step == stop
    second = made(strategies[name], seed=99)  # everything that counts has to come from the checkpoint
    fit(second, tmp_path)
    assert newest_checkpoint(tmp_path).step == 20
    assert_equal_bits(state_of(second), state_of(unbroken))


@pytest.mark.filterwarnings("ignore:the data has .* batches left")
@pytest.mark.parametrize("stop", [2, 3, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 7))])
def test_fit_with_steps_per_epoch_goes_on_bit_for_bit(strategies, tmp_path, stop):
    """Epochs of two steps that walk through five batches: the position within the examples has to be right."""
    x, y = data()

    def train(model, stop=None):
        callbacks = [SaveCheckpoints(tmp_path, every=1)] if model is not unbroken else []
        callbacks += [StopAt(stop)] if stop else []
        model.fit(x, y, batch_size=5, epochs=5, steps_per_epoch=2, verbose=0, callbacks=callbacks)

    unbroken = made(strategies["one_device"])
    train(unbroken)
    train(made(strategies["one_device"]), stop)
    second = made(strategies["one_device"], seed=99)
    train(second)
    assert_equal_bits(state_of(second), state_of(unbroken))


@pytest.mark.parametrize("kind", ["dataset", "shuffled dataset", "source"])
def test_other_data_goes_on_bit_for_bit(strategies, tmp_path, kind):
    def make_data():
        if kind == "source":
            return ArraySource(data(), batch_size=5)
        tf.random.set_seed(2)  # the pipeline is the user's own, and so is the seed that its shuffles begin with
        dataset = tf.data.Dataset.from_tensor_slices(data())
        return (dataset.shuffle(23) if kind == "shuffled dataset" else dataset).batch(5)

    def train(model, callbacks):
        model.fit(make_data(), epochs=3, verbose=0, callbacks=callbacks)
        return state_of(model)

    expected = train(made(strategies["mirrored2"]), [])
    train(made(strategies["mirrored2"]), [SaveCheckpoints(tmp_path), StopAt(7)])
    assert_equal_bits(train(made(strategies["mirrored2"], seed=99), [SaveCheckpoints(tmp_path)]), expected)


def loop_of(strategy, **options):
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = build()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.03), dynamic_growth_steps=2)
    made = tfdist.TrainLoop(model, loss="mse", optimizer=optimizer, **options)
    made.build(source())
    return made


def source():
    return ArraySource(data(), batch_size=5, seed=6)


@pytest.mark.parametrize("name", ["one_device", "mirrored2"])
def test_the_loop_goes_on_bit_for_bit(strategies, tmp_path, name):
    unbroken = loop_of(strategies[name], steps_per_loop=3)
    unbroken.run(source(), steps=14)
    first = loop_of(strategies[name], steps_per_loop=2)
    first.run(source(), steps=7, checkpoints=first.checkpoints(tmp_path))
    second = loop_of(strategies[name])
    assert second.resume(second.checkpoints(tmp_path), "must") and second.step == 7
    second.run(source(), steps=7)
    assert_equal_bits(state_of(second.model), state_of(unbroken.model))


def test_the_loop_goes_on_where_a_callback_ended_it_with_an_epoch(strategies, tmp_path):
    unbroken = loop_of(strategies["one_device"])
    unbroken.run(source(), steps=14)
    first = loop_of(strategies["one_device"])
    epoch = source().steps_per_epoch
    first.run(
        source(), steps=14, callbacks=[lambda state: state.step == epoch], checkpoints=first.checkpoints(tmp_path)
    )
    assert first.step == epoch and newest_checkpoint(tmp_path).position == first.position
    second = loop_of(strategies["one_device"])
    assert second.resume(second.checkpoints(tmp_path), "must")
    second.run(source(), steps=14 - epoch)
    assert_equal_bits(state_of(second.model), state_of(unbroken.model))


@pytest.mark.parametrize(("before", "after"), [("mirrored2", "one_device"), ("one_device", "mirrored4")])
def test_another_number_of_replicas_goes_on(strategies, tmp_path, before, after):
    """Without dropout, whose masks belong to replicas, the numbers are those of one device that never stopped."""

    def train(strategy, stop=None, folder=None):
        with strategy.scope():
            keras.utils.set_random_seed(5)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
            model.compile(keras.optimizers.Adam(0.01), "mse")
        tfdist.prepare(model)
        x, y = data()
        callbacks = ([SaveCheckpoints(folder)] if folder else []) + ([StopAt(stop)] if stop else [])
        model.fit(x, y, batch_size=5, epochs=4, verbose=0, shuffle=False, callbacks=callbacks)
        return model

    train(strategies[before], 7, tmp_path)
    found = train(strategies[after], None, tmp_path)
    expected = train(strategies["one_device"])
    for a, b in zip(state_of(found), state_of(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# Files


@pytest.fixture
def saved(strategies, tmp_path):
    """Returns (checkpoints, model) with checkpoints of steps 1, 2 and 3, the kernel being the step."""
    with strategies["one_device"].scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
    checkpoints = Checkpoints(tmp_path / "kept", model, strategies["one_device"], keep=3)
    for step in (1, 2, 3):
        model.set_weights([np.array([[step]], "float32")])
        checkpoints.save(step, Position(step=step, seed=4), wait=True)
    model.set_weights([np.zeros((1, 1), "float32")])
    return checkpoints, model


def weight(model):
    return float(model.get_weights()[0][0, 0])


def test_a_checkpoint_is_tensorflows_own_format(saved):
    checkpoints, _ = saved
    folder = checkpoints.directory / "step-00000003"
    assert sorted(file.name for file in folder.iterdir()) == [
        "checkpoint.json",
        "state.data-00000-of-00001",
        "state.index",
    ]
    reader = tf.train.load_checkpoint(str(folder / "state"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith("model_00000")]
    assert [reader.get_tensor(name).item() for name in names] == [3.0]
    meta = json.loads((folder / "checkpoint.json").read_text())
    assert (meta["step"], meta["position"]) == (3, {"epoch": 0, "step": 3, "seed": 4})
    assert folder.stat().st_mode & 0o777 == 0o755


def test_the_newest_is_restored_and_the_last_few_are_kept(saved):
    checkpoints, model = saved
    found = checkpoints.restore()
    assert (found.step, found.position, weight(model)) == (3, Position(0, 3, 4), 3.0)
    checkpoints.save(4, Position(), wait=True)
    checkpoints.save(4, Position(), wait=True)  # again: it is there already
    assert [path.name for path in sorted(checkpoints.directory.iterdir())] == [f"step-{step:08d}" for step in (2, 3, 4)]
    model.set_weights([np.zeros((1, 1), "float32")])
    assert checkpoints.restore("never") is None and weight(model) == 0.0


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "cut off": lambda folder: os.truncate(folder / "state.data-00000-of-00001", 3),
    "one bit": lambda folder: flip(folder / "state.data-00000-of-00001"),
    "one bit of the index": lambda folder: flip(folder / "state.index"),
    "file gone": lambda folder: (folder / "state.index").unlink(),
    "no json": lambda folder: (folder / "checkpoint.json").unlink(),
    "empty json": lambda folder: (folder / "checkpoint.json").write_text(""),
    "other json": lambda folder: (folder / "checkpoint.json").write_text('{"step": 3}'),
    "half written": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_is_named_and_the_one_before_is_used(saved, caplog, damage):
    checkpoints, model = saved
    newest = checkpoints.directory / "step-00000003"
    damage(newest)
    with caplog.at_level("WARNING", logger="tfdist"):
        assert checkpoints.restore("must").step == 2
    assert weight(model) == 2.0
    assert str(newest) in caplog.text and "is damaged" in caplog.text
    checkpoints.save(3, Position(), wait=True)  # training comes by again: the damaged one gives way
    assert newest_checkpoint(checkpoints.directory).step == 3


def test_must_without_a_whole_checkpoint(saved, tmp_path):
    checkpoints, _ = saved
    for folder in checkpoints.directory.iterdir():
        DAMAGES["file gone"](folder)
    assert checkpoints.restore("auto") is None
    for ask in (lambda: checkpoints.restore("must"), lambda: require_checkpoint(tmp_path / "nothing")):
        with pytest.raises(UsageError, match="there is no whole checkpoint in .*give the folder"):
            ask()
    with pytest.raises(UsageError, match="resume='always': choose one of auto, never, must"):
        checkpoints.restore("always")


def test_foreign_files_stay(saved):
    checkpoints, _ = saved
    names = ("notes.txt", "step-final", "step-3", "best.keras", "step-00000009.bak")
    for name in names:
        (checkpoints.directory / name).write_text("mine")
    (checkpoints.directory / "events").mkdir()
    for step in range(4, 9):
        checkpoints.save(step, Position(), wait=True)
    assert all((checkpoints.directory / name).read_text() == "mine" for name in names)
    assert (checkpoints.directory / "events").is_dir()
    assert newest_checkpoint(checkpoints.directory).step == 8


@pytest.mark.parametrize(
    ("layers", "optimizer", "words"),
    [
        ([{"units": 1}, {"units": 1}], "sgd", "it has no value for .*/bias"),
        ([{"units": 3, "use_bias": False}], "sgd", r"kernel has shape \(1, 3\), and \(1, 1\) was saved"),
        ([], "sgd", "model 0 was saved, and there is no such variable"),
        ([{"units": 1, "use_bias": False}], "adam", "it has no value for adam.*momentum"),
        ([{"units": 1, "use_bias": False, "dtype": "float64"}], "sgd", "kernel has type float64, and float32 was"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(saved, strategies, layers, optimizer, words):
    checkpoints, _ = saved
    with strategies["one_device"].scope():
        other = keras.Sequential([keras.Input((1,)), *[keras.layers.Dense(**layer) for layer in layers]])
        other.compile(optimizer, "mse")
        other.optimizer.build(other.trainable_variables)
    before = other.get_weights()
    with pytest.raises(UsageError, match=f"does not fit the model, its optimizer or the hook: .*{words}"):
        Checkpoints(checkpoints.directory, other, strategies["one_device"]).restore()
    assert_equal_bits(other.get_weights(), before)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_how_many_to_keep(strategies, tmp_path, keep):
    with pytest.raises(UsageError, match="keep="):
        Checkpoints(tmp_path, None, strategies["one_device"], keep=keep)


SAVES_WITHOUT_END = """
import sys
import keras
import tensorflow as tf
from tfdist.data import Position
from tfdist.training.checkpoint import Checkpoints
model = keras.Sequential([keras.Input((1500,))] + [keras.layers.Dense(1500) for _ in range(4)])
model.compile("sgd", "mse")
checkpoints = Checkpoints(sys.argv[1], model, tf.distribute.get_strategy(), keep=2)
step = 0
while True:
    step += 1
    model.layers[0].bias.assign([float(step)] * 1500)
    checkpoints.save(step, Position(step=step), wait=True)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("whole", [1, 2])
def test_a_kill_while_saving_leaves_the_one_before(tmp_path, whole):
    """Killed with a checkpoint half written after `whole` others: the newest that is there is whole."""
    folder = tmp_path / "kept"
    with subprocess.Popen([sys.executable, "-c", SAVES_WITHOUT_END, str(folder)]) as process:
        deadline = time.monotonic() + 90
        half_written = False
        while not half_written and time.monotonic() < deadline and process.poll() is None:
            if len(list(folder.glob("step-*"))) >= whole and list(folder.glob(".step-*/*")):
                process.send_signal(signal.SIGSTOP)  # so that it cannot finish while we look again
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                half_written = bool(list(folder.glob(".step-*/*")))
                process.send_signal(signal.SIGKILL if half_written else signal.SIGCONT)
        process.kill()
    assert half_written
    found = require_checkpoint(folder)
    reader = tf.train.load_checkpoint(str(found.path / "state"))
    biases = [name for name, shape in reader.get_variable_to_shape_map().items() if shape == [1500]]
    assert float(found.step) in {reader.get_tensor(name)[0] for name in biases}


def test_what_a_killed_one_left_is_removed_by_the_next_save(saved):
    checkpoints, _ = saved
    left = checkpoints.directory / ".step-00000004-abc"
    left.mkdir()
    (left / "state.index").write_text("half")
    checkpoints.save(4, Position(), wait=True)
    assert not left.exists() and newest_checkpoint(checkpoints.directory).step == 4


def test_save_checkpoints_needs_a_prepared_model_and_sound_arguments(strategies, tmp_path):
    model = build()
    with pytest.raises(UsageError, match="tfdist.prepare"):
        fit(model, tmp_path)
    with pytest.raises(UsageError, match="every=0"):
        SaveCheckpoints(tmp_path, every=0)
    with pytest.raises(UsageError, match="resume='yes'"):
        SaveCheckpoints(tmp_path, resume="yes")
    with pytest.raises(UsageError, match="there is no whole checkpoint"):
        fit(made(strategies["one_device"]), tmp_path / "none", resume="must")


def test_save_checkpoints_every_few_steps(strategies, tmp_path):
    fit(made(strategies["one_device"]), tmp_path, epochs=2, every=4, keep=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (4, 8, 10)]


@pytest.mark.parametrize("name", ["one_device", "mirrored2"])
def test_a_step_that_fails_while_it_is_traced_leaves_checkpoints_whole(strategies, tmp_path, name):
    """Whatever Keras makes when it is first asked for (its global seed generator) must not be made in that trace."""

    def fails(y_true, y_pred):
        if isinstance(y_pred, tf.Tensor) and len(calls) >= 1:
            raise RuntimeError("mine")
        calls.append(1)
        return tf.reduce_mean(tf.square(y_true - y_pred))

    calls: list = []
    with strategies[name].scope():
        keras.utils.set_random_seed(5)  # takes the generator away
        broken = build()
        broken.compile("sgd", fails)
    with pytest.raises(RuntimeError, match="mine"):
        fit(tfdist.prepare(broken))
    with strategies[name].scope():
        model = build()
    fit(tfdist.prepare(model), tmp_path, stop=3)
    with strategies[name].scope():
        resumed = build()
    fit(tfdist.prepare(resumed), tmp_path, resume="must")
    assert newest_checkpoint(tmp_path).step == 20


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 300 kB, and what makes it read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("this user cannot mount a disk that is small or read-only")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    subprocess.run(["umount", folder], check=True)


def made_small(strategies, folder, **options):
    """Returns checkpoints of a small model in `folder`, with one at step 1, from which it goes on."""
    strategy = strategies["one_device"]
    model = made(strategy)
    loop = tfdist.TrainLoop(model, loss="mse", optimizer="adam")
    loop.build(source())
    checkpoints = loop.checkpoints(folder, **options)
    checkpoints.restore()
    checkpoints.save(1, Position(step=1), wait=True)
    return checkpoints


def assert_only_the_first_is_there(folder):
    assert [path.name for path in folder.iterdir() if path.name != "filler"] == ["step-00000001"]
    assert newest_checkpoint(folder).step == 1


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_takes_no_more(strategies, small_disk, caplog, how):
    """By default training stops with a message; with "continue" it goes on, and saves again when there is room."""
    folder, make_read_only = small_disk
    checkpoints = made_small(strategies, folder)
    careless = made_small(strategies, folder, on_error="continue")
    if how == "full":
        with contextlib.suppress(OSError):
            (folder / "filler").write_bytes(b"x" * 300_000)
    else:
        make_read_only()
    words = "No space left" if how == "full" else "Read-only file system"
    with pytest.raises(SaveError, match=f"the checkpoint of step 2 could not be written into .*{words}.*untouched"):
        checkpoints.save(2, Position(step=2), wait=True)
    assert_only_the_first_is_there(folder)
    with caplog.at_level("WARNING"):
        careless.save(2, Position(step=2), wait=True)
    assert "step 2 could not be written" in caplog.text and "training goes on" in caplog.text
    assert_only_the_first_is_there(folder)
    if how == "full":
        (folder / "filler").unlink()
        careless.save(3, Position(step=3), wait=True)
        assert newest_checkpoint(folder).step == 3


def test_checkpoints_of_an_earlier_training_are_moved_aside(strategies, tmp_path, monkeypatch):
    """A training that begins anew must not stop at an old checkpoint of the same step, nor lose it."""
    for value, aside in ((1.0, []), (2.0, ["earlier-1"]), (3.0, ["earlier-1", "earlier-2"])):
        model = made(strategies["one_device"])
        loop = tfdist.TrainLoop(model, loss="mse", optimizer="adam")
        loop.build(source())
        checkpoints = loop.checkpoints(tmp_path)
        assert checkpoints.restore("never") is None
        model.layers[0].kernel.assign(model.layers[0].kernel * 0 + value)
        checkpoints.save(4, Position(step=4), wait=True)
        checkpoints.save(4, Position(step=4), wait=True)  # the same training: it is there
        assert sorted(path.name for path in tmp_path.glob("earlier-*")) == aside
        assert checkpoints.restore().step == 4 and weight(model) == value
    assert newest_checkpoint(tmp_path / "earlier-1").step == newest_checkpoint(tmp_path / "earlier-2").step == 4


def test_never_goes_on_only_from_what_the_same_job_has_saved(saved, strategies, monkeypatch):
    """A job that failed before its first save must not go on from what another job has left."""
    checkpoints, model = saved
    monkeypatch.setenv("TFDIST_ATTEMPT", "1")
    monkeypatch.setenv("TFDIST_JOB", "new")
    again = Checkpoints(checkpoints.directory, model, strategies["one_device"])
    assert again.restore("never") is None and weight(model) == 0.0
    again.save(1, Position(step=1), wait=True)
    assert newest_checkpoint(checkpoints.directory).step == 1
    assert newest_checkpoint(checkpoints.directory / "earlier-1").step == 3
    assert again.restore("never").step == 1
    monkeypatch.delenv("TFDIST_JOB")
    monkeypatch.delenv("TFDIST_ATTEMPT")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    again.save(2, Position(step=2), wait=True)
    assert again.restore("never") is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # requeued
    assert again.restore("never").step == 2


def test_a_damaged_later_one_pushes_no_good_one_out(saved):
    checkpoints, _ = saved
    checkpoints.keep = 1
    for step in (2, 3):
        (checkpoints.directory / f"step-{step:08d}" / "state.index").unlink()
    assert checkpoints.restore("must").step == 1
    checkpoints.save(2, Position(step=2), wait=True)
    assert newest_checkpoint(checkpoints.directory).step == 2


def test_the_next_save_moves_aside_what_could_not_be_moved(saved, strategies, caplog):
    checkpoints, model = saved
    hurdle = checkpoints.directory / "earlier-1"
    hurdle.symlink_to("nowhere")
    again = Checkpoints(checkpoints.directory, model, strategies["one_device"], on_error="continue")
    again.save(1, Position(step=1), wait=True)
    assert "the checkpoint of step 1 could not be written" in caplog.text
    hurdle.unlink()
    again.save(2, Position(step=2), wait=True)
    assert newest_checkpoint(checkpoints.directory).step == 2
    assert newest_checkpoint(checkpoints.directory / "earlier-1").step == 3


def test_a_training_waits_for_what_the_one_before_still_writes(saved, strategies):
    """As in a notebook, where `fit` is interrupted and called again."""
    checkpoints, model = saved
    checkpoints.save(4, Position(step=4))
    assert Checkpoints(checkpoints.directory, model, strategies["one_device"]).restore().step == 4


def test_a_folder_that_vanishes_is_not_made_anew(strategies, tmp_path):
    """To make it anew would hide that a disk has gone."""
    folder = tmp_path / "mounted"
    checkpoints = made_small(strategies, folder)
    folder.rename(tmp_path / "gone")
    with pytest.raises(SaveError, match="the folder has vanished"):
        checkpoints.save(2, Position(step=2), wait=True)
    assert not folder.exists()
    (tmp_path / "gone").rename(folder)
    checkpoints.save(2, Position(step=2), wait=True)
    assert newest_checkpoint(folder).step == 2


@pytest.mark.parametrize("on_save_error", ["stop", "continue"])
def test_fit_stops_or_goes_on(strategies, tmp_path, on_save_error):
    """The folder vanishes in the second epoch, and comes back in the last."""
    model = made(strategies["one_device"])
    folder, gone = tmp_path / "mounted", tmp_path / "gone"
    epochs = []

    def begin(epoch, logs):
        epochs.append(epoch)
        if epoch == 1:
            folder.rename(gone)
        if epoch == 3:
            gone.rename(folder)

    callbacks = [
        SaveCheckpoints(folder, every=3, on_save_error=on_save_error),
        keras.callbacks.LambdaCallback(on_epoch_begin=begin),
    ]
    x, y = data()
    fit = functools.partial(model.fit, x, y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
    if on_save_error == "stop":
        with pytest.raises(SaveError, match="on_save_error='continue' trains on"):
            fit()
        assert epochs == [0, 1]
    else:
        fit()
        assert epochs == [0, 1, 2, 3] and newest_checkpoint(folder).step == 24


@pytest.mark.parametrize(("size", "part_bytes"), [(1, 1 << 20), (17, 1 << 20), (17, 100), (2, 1)])
def test_the_files_are_those_of_tensorflow(tmp_path, monkeypatch, size, part_bytes):
    """What `tf.train.Checkpoint` writes of the same values has the same keys, types, values and object graph."""
    monkeypatch.setattr(checkpoint_files, "_PART_BYTES", part_bytes)
    rng = np.random.default_rng(1)
    values = {f"model_{i:05d}": tf.constant(rng.normal(size=(3, i))) for i in range(size)}
    values |= {"seed_00000": tf.constant([1, 2], tf.uint32), "half": tf.constant(0.5, tf.bfloat16)}
    folder = checkpoint_files.write_checkpoint(
        tmp_path, 1, Position(), values, keep=1, identity=checkpoint_files.identity_of(tmp_path), rest=lambda: None
    )
    stock = tf.train.Checkpoint(**{name: tf.Variable(value) for name, value in values.items()})
    ours, theirs = (tf.train.load_checkpoint(str(p)) for p in (folder / "state", stock.write(str(tmp_path / "stock"))))
    assert ours.get_variable_to_shape_map() == theirs.get_variable_to_shape_map()
    assert ours.get_variable_to_dtype_map() == theirs.get_variable_to_dtype_map()
    for key in ours.get_variable_to_shape_map():
        np.testing.assert_array_equal(ours.get_tensor(key), theirs.get_tensor(key))
    read = {name: tf.Variable(tf.zeros_like(value)) for name, value in values.items()}
    tf.train.Checkpoint(**read).read(str(folder / "state")).assert_consumed()
    for name, value in values.items():
        np.testing.assert_array_equal(read[name].numpy(), value.numpy())


@pytest.mark.parametrize(("name", "jit"), [("mirrored2", False), ("one_device", False), ("one_device", True)])
def test_training_changes_nothing_of_what_is_being_written(strategies, tmp_path, monkeypatch, name, jit):
    """A checkpoint whose writing takes long holds the values of its own step, bit for bit.

    TensorFlow lets values share their memory with the variables until these are written to.
    """
    strategy = strategies[name]
    model = made(strategy)
    loop = tfdist.TrainLoop(model, loss="mse", optimizer=keras.optimizers.Adam(0.05), jit_compile=jit)
    loop.build(source())
    write = checkpoint_module.write_checkpoint
    proceed = threading.Event()

    def late(*arguments, **options):
        assert proceed.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", late)
    checkpoints = loop.checkpoints(tmp_path)
    loop.run(source(), steps=3)
    expected = state_of(model)
    checkpoints.save(3, loop.position)
    loop.run(source(), steps=4)
    assert any((a != b).any() for a, b in zip(state_of(model), expected, strict=True))
    proceed.set()
    checkpoints.wait()
    checkpoints.restore("must")
    assert_equal_bits(state_of(model), expected)
