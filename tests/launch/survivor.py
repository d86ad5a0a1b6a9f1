"""A worker of `test_survival`: trains on four small epochs with an evaluation after each, and can be slow where asked.

Usage: survivor.py {fit,loop} FOLDER, by `tfdist launch`. SLOW=PHASE[:WORKER] makes PHASE (trace, data, step,
evaluation, callback, save) take SECONDS, at its time AT, on that worker or on all; the file `at-PHASE-WORKER` in FOLDER
tells when. It is written once, so that a restarted worker is not slow again. LOST=PLACE lets the worker at that place
die in its third epoch, and at once when it is started again. PACE is a rest in seconds after each call that trains;
with SYNC, training waits for its saves.
The chief appends the number of every step to `steps` and
the losses of every epoch to `losses`, and every worker leaves a hash of its weights.
"""

import collections
import functools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdist  # noqa: E402
from tfdist import flags  # noqa: E402
from tfdist.data import ArraySource  # noqa: E402
from tfdist.summary import weights_sha256  # noqa: E402
from tfdist.training import checkpoint  # noqa: E402
from tfdist.training.save_callback import SaveCheckpoints  # noqa: E402

ROWS, BATCH, EPOCHS, EVERY = 60, 4, 4, 5
HOOK = "allreduce:bucket_mb=4"  # a given size needs not be measured at each start


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    phase, _, worker = os.environ.get("SLOW", "").partition(":")
    seconds, at = float(os.environ.get("SECONDS", "0")), int(os.environ.get("AT", "1"))
    times: collections.Counter[str] = collections.Counter()
    index = tfdist.Cluster.detect().index
    asynchronous = "SYNC" not in os.environ
    lost = os.environ.get("LOST") == os.environ["TFDIST_PLACE"]
    if lost and os.environ["TFDIST_RESTARTS"] != "0":
        os._exit(9)
    strategy = tfdist.make_strategy("multi_worker")

    def slow(where: str) -> None:
        """Is slow, once, where the test has asked for it."""
        mark = folder / f"at-{where}-{index}"
        times[where] += 1
        if where == phase and times[where] >= at and worker in ("", str(index)) and not mark.exists():
            mark.write_text("")
            time.sleep(seconds)

    def passed(where: str, x: tf.Tensor) -> tf.Tensor:
        result = tf.py_function(lambda x: (slow(where), x)[1], [x], x.dtype)
        result.set_shape(x.shape)
        return result

    def loss(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        slow("trace")
        return tf.reduce_mean(tf.square(y_true - passed("step", y_pred)), axis=-1)

    checkpoint.write_checkpoint = functools.partial(_write, checkpoint.write_checkpoint, slow)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(ROWS, 6)).astype("float32"), rng.normal(size=(ROWS, 2)).astype("float32")

    def batches(where: str) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        return data.map(lambda x, y: (passed(where, x), y))

    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), loss)

    def seen(report: object) -> None:
        if index == 0:
            with open(folder / "steps", "a") as file:
                file.write(f"{report.step}\n")
        slow("callback")
        time.sleep(float(os.environ.get("PACE", "0")))
        if lost and report.step == 33:
            os._exit(9)

    if kind == "fit":
        tfdist.prepare(model, hook=HOOK, step_listener=seen)
        saves = SaveCheckpoints(folder / "checkpoints", every=EVERY, asynchronous=asynchronous)
        watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note(folder, index, epoch, logs))
        data, validation = batches("data"), batches("evaluation")
        model.fit(data, epochs=EPOCHS, validation_data=validation, verbose=0, callbacks=[saves, watch])
    else:
        source = ArraySource((x, y), batch_size=BATCH, seed=2)
        loop = tfdist.TrainLoop(
            model, loss=loss, optimizer=model.optimizer, hook=HOOK, steps_per_loop=3, step_listener=seen
        )
        loop.build(source)
        checkpoints = loop.checkpoints(folder / "checkpoints", asynchronous=asynchronous)
        loop.resume(checkpoints)
        loop.run(
            source,
            steps=EPOCHS * ROWS // BATCH - loop.step,
            validation=batches("evaluation"),
            validate_every=15,
            checkpoints=checkpoints,
            checkpoint_every=EVERY,
        )
    (folder / f"weights-{index}").write_text(weights_sha256(model))
    tfdist.strategy.leave_together(strategy)


def note(folder: Path, index: int, epoch: int, logs: dict) -> None:
    """Notes the losses of an epoch."""
    if index == 0:
        with open(folder / "losses", "a") as file:
            file.write(json.dumps({"epoch": epoch, **logs}) + "\n")


def _write(write: object, slow: object, *arguments: object, **options: object) -> object:
    slow("save")
    return write(*arguments, **options)


if __name__ == "__main__":
    flags.run_main(main, sys.argv[:1])
