"""One worker of scripts/bench_aggregation.py: aggregation_run.py MODEL HOOKS ROUNDS STEPS OUT, with TF_CONFIG set.

Every way to aggregate has a model of its own in the same job; they take turns, so that all see the same machine.
Without TF_CONFIG the worker is alone, which gives the time of one worker without any communication.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that has models/
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import models  # noqa: E402
import tfdist  # noqa: E402

STOCK = "stock"
_EXAMPLES = {"transformer": 32, "resnet18": 8}  # of one worker in a step
_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum_over_batch_size")


def main(model: str, hooks: list[str], rounds: int, steps: int, out: Path) -> None:
    """Writes the times of all ways as JSON, on the first worker."""
    cluster = tfdist.Cluster.detect()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[cluster.index % os.cpu_count()]})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.random.set_seed(1)
    strategy = tfdist.make_strategy("multi_worker" if cluster.num_workers > 1 else "one_device")
    ways = {hook: (stock if hook == STOCK else with_hook)(strategy, model, hook) for hook in hooks}
    times: dict[str, list[float]] = {hook: [] for hook in hooks}
    for round_number in range(rounds + 1):
        for hook, (run, _) in ways.items():
            seconds = run(steps if round_number else 2)
            if round_number:
                times[hook].append(1e3 * seconds)
    if cluster.index == 0:
        bytes_sent = {hook: report() for hook, (_, report) in ways.items()}
        out.write_text(json.dumps({"ms": times, "bytes": bytes_sent}))


def with_hook(strategy: tf.distribute.Strategy, name: str, hook: str) -> tuple[Callable, Callable]:
    """Returns a function that trains some steps with tfdist, and one that gives the bytes a step sends."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = built(name)
    loop = tfdist.TrainLoop(model, loss=_LOSS, optimizer="adam", hook=hook, steps_per_loop=10_000)
    source = tfdist.data.ArraySource(arrays(name, replicas), batch_size=_EXAMPLES[name] * replicas, shuffle=False)

    def run(steps: int) -> float:
        loop.run(source.with_steps(1), steps=1)
        start = time.perf_counter()
        loop.run(source, steps=steps)
        return (time.perf_counter() - start) / steps

    return run, lambda: loop.hook.report.bytes_per_step if loop.hook.report else 0


def stock(strategy: tf.distribute.Strategy, name: str, _: str) -> tuple[Callable, Callable]:
    """Returns a function that trains some steps as TensorFlow's guides do, with its default aggregation."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = built(name)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    x, y = (part[: _EXAMPLES[name]] for part in arrays(name, replicas))
    batch = tf.constant(x), tf.constant(y)

    def step() -> None:
        with tf.GradientTape() as tape:
            predicted = model(batch[0], training=True)
            losses = keras.losses.sparse_categorical_crossentropy(batch[1], predicted, from_logits=True)
            loss = tf.reduce_mean(losses) / replicas
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function(autograph=False)
    def loop(steps: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor) -> tuple[tf.Tensor]:
            strategy.run(step)
            return (i + 1,)

        return tf.while_loop(lambda i: i < steps, body, (tf.constant(0),), parallel_iterations=1)[0]

    def run(steps: int) -> float:
        loop(tf.constant(1)).numpy()
        start = time.perf_counter()
        loop(tf.constant(steps)).numpy()
        return (time.perf_counter() - start) / steps

    size = 4 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return run, lambda: round(2 * (replicas - 1) / replicas * size)


def built(name: str) -> keras.Model:
    """Returns the model: a transformer of 3.3 million parameters, or a ResNet-18 for small images."""
    if name == "transformer":
        return models.build(models.find("transformer_lm"), width=256, depth=4, heads=4, seq_len=64)
    return models.build(models.find("resnet18"), image_shape=(32, 32, 3))


def arrays(name: str, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples for one step of all replicas."""
    rng = np.random.default_rng(0)
    count = _EXAMPLES[name] * replicas
    if name == "transformer":
        tokens = rng.integers(0, 256, size=(count, 65)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]
    return rng.normal(size=(count, 32, 32, 3)).astype("float32"), rng.integers(0, 10, size=count).astype("int32")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], given[1].split(";"), int(given[2]), int(given[3]), Path(given[4]))
