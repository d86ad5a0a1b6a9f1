"""A training of a user's own, with a cause of bad scaling planted into it by --plant."""

import argparse
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.strategy import leave_together, worker_index

FEATURES = 128


class Pause(keras.callbacks.Callback):
    """Takes 60 ms after each step, on the chief: more than a core may be slower than the other."""

    chief_only = True

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.060)


def data(batch_size, steps, sleep):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch_size, FEATURES)).astype("float32"), rng.normal(size=(batch_size, 1)).astype("float32")
    batches = tf.data.Dataset.from_tensors((x, y)).repeat(steps)
    if sleep:

        def late(x, y):
            def wait():
                time.sleep(sleep)
                return np.float32(0)

            return x + tf.numpy_function(wait, [], tf.float32), y

        batches = batches.map(late).map(lambda x, y: (tf.ensure_shape(x, [batch_size, FEATURES]), y))
    return batches


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--log_dir")
    parser.add_argument("--hook")
    parser.add_argument("--global_batch_size", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plant", choices=("nothing", "input", "busy", "serial"), default="nothing")
    options = parser.parse_args()
    strategy = tfdist.make_strategy("auto")
    with strategy.scope():
        layers = [keras.layers.Dense(FEATURES, "relu") for _ in range(5)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tfdist.prepare(model, hook=options.hook)
    batches = data(options.global_batch_size, options.steps, 0.020 if options.plant == "input" else 0)
    callbacks = [tfdist.ScalingCallback(options.log_dir)]
    if options.plant == "serial":
        callbacks.append(Pause())
    busy = None
    if options.plant == "busy" and worker_index(strategy) == 1:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # inherits the one core of this worker
    try:
        model.fit(batches, verbose=0, callbacks=callbacks)
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    leave_together(strategy)


if __name__ == "__main__":
    main()
