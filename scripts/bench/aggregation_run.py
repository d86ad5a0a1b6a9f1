"""One worker of scripts/bench_aggregation.py: aggregation_run.py MODEL WAYS ROUNDS STEPS OUT, with TF_CONFIG set.

A way is a hook and a transport, such as bf16@mpi, or stock.

Every way to aggregate has a model of its own in the same job; they take turns, so that all see the same machine.
Without TF_CONFIG the worker is alone, which gives the time of one worker without any communication.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that has models/
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import models  # noqa: E402
import tfdist  # noqa: E402
from tfdist.training.workers import broadcast_int  # noqa: E402
from tfdist.transport import make_transport  # noqa: E402

STOCK = "stock"
TENSORS, BARRIER = "tensors", "barrier"
_EXAMPLES = {"transformer": 32, "resnet18": 8}  # of one worker in a step
_TENSORS, _TENSOR_SHAPE = 100, (500, 500)  # 1 MB each
_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum_over_batch_size")


def main(model: str, ways: list[str], rounds: int, steps: int, out: Path) -> None:
    """Writes the times of all ways as JSON, on the first worker."""
    cluster = tfdist.Cluster.detect()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[cluster.index % os.cpu_count()]})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.random.set_seed(1)
    strategy = tfdist.make_strategy("multi_worker" if cluster.num_workers > 1 else "one_device")
    made = {way: make(strategy, model, way) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(rounds + 1):
        for way, (run, _) in made.items():
            seconds = run(steps if round_number else 2)
            if round_number:
                times[way].append(1e3 * seconds)
    if cluster.index == 0:
        bytes_sent = {way: report() for way, (_, report) in made.items()}
        out.write_text(json.dumps({"ms": times, "bytes": bytes_sent}))


def make(strategy: tf.distribute.Strategy, model: str, way: str) -> tuple[Callable, Callable]:
    """Returns a function that runs some steps and says how long one took, and one that gives the bytes it sends."""
    if model == TENSORS:
        return tensors(strategy, way)
    return stock(strategy, model) if way == STOCK else with_hook(strategy, model, *way.split("@"))


def tensors(strategy: tf.distribute.Strategy, way: str) -> tuple[Callable, Callable]:
    """Aggregates 100 gradients of 1 MB that are there already, one after the other, as a backward pass gives them."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [keras.Variable(tf.zeros(_TENSOR_SHAPE)) for _ in range(_TENSORS)]
    hook = None
    if way != STOCK:
        spec, name = way.split("@")
        hook = Barrier() if spec == BARRIER else tfdist.hooks.parse(spec)
        with strategy.scope():
            hook.build(variables)
        hook.transport = make_transport(name, strategy, lambda value: broadcast_int(strategy, value))
        hook.tune(strategy, lambda value: broadcast_int(strategy, value))
    gradients = [tf.random.stateless_normal(_TENSOR_SHAPE, [i, 1]) for i in range(_TENSORS)]

    def on_replica(scale: tf.Tensor) -> tf.Tensor:
        scaled = [gradient * scale for gradient in gradients]
        if hook is None:
            totals = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, scaled)
        else:
            totals = hook.aggregate(scaled, variables)
        return tf.add_n([total[0, 0] for total in totals])

    @tf.function(autograph=False)
    def step(scale: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, (scale,)))[0]

    def run(steps: int) -> float:
        step(tf.constant(1.0)).numpy()
        start = time.perf_counter()
        for i in range(steps):
            step(tf.constant(float(i))).numpy()
        return (time.perf_counter() - start) / steps

    size = 4 * _TENSORS * int(np.prod(_TENSOR_SHAPE))
    dense = round(2 * (replicas - 1) / replicas * size)
    return run, lambda: hook.report.bytes_per_step if hook and hook.report else dense


def with_hook(strategy: tf.distribute.Strategy, name: str, hook: str, transport: str) -> tuple[Callable, Callable]:
    """Trains with tfdist; see `make`."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = built(name)
    made = Barrier() if hook == BARRIER else hook
    loop = tfdist.TrainLoop(model, loss=_LOSS, optimizer="adam", hook=made, transport=transport, steps_per_loop=10_000)
    source = tfdist.data.ArraySource(arrays(name, replicas), batch_size=_EXAMPLES[name] * replicas, shuffle=False)

    def run(steps: int) -> float:
        loop.run(source.with_steps(1), steps=1)
        start = time.perf_counter()
        loop.run(source, steps=steps)
        return (time.perf_counter() - start) / steps

    return run, lambda: loop.hook.report.bytes_per_step if loop.hook.report else 0


class Barrier(tfdist.hooks.NoOp):
    """Sums one number, once the backward pass has ended: what it takes that workers wait for each other."""

    name = BARRIER

    def aggregate(self, gradients: list, variables: Sequence[keras.Variable]) -> list:
        """Returns the gradients of this replica, after the others have come as far."""
        with tf.control_dependencies([g for g in gradients if isinstance(g, tf.Tensor)]):
            together = self.transport.all_reduce(tf.zeros([1]))
        with tf.control_dependencies([together]):
            return [tf.identity(g) for g in super().aggregate(gradients, variables)]


def stock(strategy: tf.distribute.Strategy, name: str) -> tuple[Callable, Callable]:
    """Trains as TensorFlow's guides do, with its default aggregation; see `make`."""
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
