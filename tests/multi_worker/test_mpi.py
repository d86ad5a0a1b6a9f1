"""Gradients over MPI: the numbers of one device, and the same bits as over TensorFlow's collectives."""

import logging

import keras
import numpy as np
import pytest

import tfdist
from tests.multi_worker.harness import on_workers
from tfdist import hooks


def model(optimizer):
    inputs = keras.Input((3,))
    x = keras.layers.Dense(16, "tanh")(inputs)
    x = keras.layers.Dense(16, "tanh")(x)
    made = keras.Model(inputs, keras.layers.Dense(2)(x))
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def data(rows=22):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return x, np.tanh(x @ rng.normal(size=(3, 2))).astype("float32")


def trained(job, hook=None, transport="mpi", epochs=2, optimizer="adam", **options):
    with job.scope():
        keras.utils.set_random_seed(7)
        made = model(optimizer if isinstance(optimizer, str) else optimizer())
    job.prepare(made, hook=hook, transport=transport, **options)
    x, y = data()
    history = made.fit(x, y, batch_size=6, epochs=epochs, shuffle=False, verbose=0)
    return made, history.history


@on_workers(2, 3, mpi=True)
def test_fit_with_many_buckets_and_a_last_batch_that_is_not_full(job):
    made, history = trained(job, "allreduce:bucket_mb=0.0005")
    return {"weights": made.get_weights(), "history": history}


@on_workers(2, mpi=True, stock=False)
def test_the_same_bits_as_over_collectives(job):
    found = {name: trained(job, transport=name)[0].get_weights() for name in ("mpi", "collective")}
    for a, b in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(a, b)


@on_workers(2, 3, mpi=True)
def test_sparse_gradients_of_unequally_many_rows(job):
    """Seven examples for a global batch of five: replicas have unequally many rows, and some none."""
    with job.scope():
        keras.utils.set_random_seed(3)
        embed = keras.layers.Embedding(20, 4)
        made = keras.Sequential(
            [keras.Input((3,), dtype="int32"), embed, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        made.compile("adam", "mse")
    job.prepare(made, transport="mpi")
    ids = np.random.default_rng(1).integers(0, 20, size=(7, 3))
    made.fit(ids, ids.sum(axis=1, keepdims=True) / 20.0, batch_size=5, epochs=3, shuffle=False, verbose=0)
    return {"weights": made.get_weights()}


@on_workers(2, mpi=True)
def test_accumulation_and_clipping(job):
    if job.stock:
        made, history = trained(job, optimizer=lambda: keras.optimizers.Adam(global_clipnorm=0.1))
    else:
        made, history = trained(job, accumulate_steps=3, clip_global_norm=0.1)
    return {"weights": made.get_weights(), "loss": history["loss"]}


@pytest.mark.slow
@on_workers(2, 3, mpi=True, stock=False)
def test_lossy_hooks_learn_and_workers_agree(job):
    found = {}
    for spec in ("bf16", "fp16", "int8", "topk:ratio=0.2", "powersgd:rank=2", "powersgd:rank=2,start_step=3"):
        hook = hooks.parse(spec)
        made, history = trained(job, hook, epochs=20, optimizer=lambda: keras.optimizers.Adam(0.05))
        assert history["loss"][-1] < 0.5 * history["loss"][0], (spec, history)
        assert hook.transport.name == "mpi" and 0 < hook.report.bytes_per_step < hook.report.dense_bytes_per_step
        found[spec] = made.get_weights()
    return found


@on_workers(2, mpi=True, stock=False)
def test_exchanges_within_conditions(job):
    """Local SGD averages in some steps only, and samples are taken in some; both branch on every worker alike."""
    apart, _ = trained(job, "local_sgd:period=4", optimizer=lambda: keras.optimizers.SGD(0.1))
    hook = hooks.parse("topk:ratio=0.3,sample_every=3")
    trained(job, hook)
    assert 0.3 < hook.report.cosine < 1
    return {"met": apart.get_weights(), "cosine": hook.report.cosine}


@on_workers(2, 3, mpi=True, stock=False)
def test_16_bit_sums_are_rounded_once(job):
    """bfloat16 holds 8 bits: 256 + 1 + 1 is 256 where each sum is rounded, and 258 where only the last one is."""
    import tensorflow as tf

    from tfdist.training.workers import broadcast_int
    from tfdist.transport import make_transport

    transport = make_transport("mpi", job.strategy, lambda value: broadcast_int(job.strategy, value))
    own = 256.0 if job.index == 0 else 1.0

    @tf.function
    def run():
        def on_replica():
            return transport.all_reduce(tf.fill([5], tf.cast(own, tf.bfloat16)))

        return job.strategy.experimental_local_results(job.strategy.run(on_replica))[0]

    expected = np.float32(np.asarray(256 + job.num_workers - 1, tf.bfloat16.as_numpy_dtype))
    np.testing.assert_array_equal(np.asarray(run(), np.float32), expected)


@on_workers(2, mpi=True, stock=False)
def test_a_value_that_is_not_finite_on_one_worker_skips_the_step_on_both(job):
    x, y = data(6)
    x[5] = np.inf  # of the second worker's half
    with job.scope():
        made = model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0))
    job.prepare(made, transport="mpi")
    before = made.get_weights()
    made.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    for a, b in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@on_workers(2, mpi=True, stock=False)
def test_auto_measures_both_and_says_what_it_takes(job):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tfdist")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        hook = hooks.parse("allreduce")
        trained(job, hook, transport="auto")
    finally:
        logger.removeHandler(handler)
    said = [line for line in lines if line.startswith("transport auto: ")]
    assert len(said) == 1 and said[0].startswith(f"transport auto: {hook.transport.name}: 4 MiB in "), lines
    assert "mpi: 4 MiB" in said[0] and "collective: 4 MiB" in said[0]
    return {"taken": hook.transport.name}


@on_workers(2, mpi=True, stock=False)
def test_the_custom_loop(job):
    with job.scope():
        keras.utils.set_random_seed(7)
        made = model("adam")
    loop = tfdist.TrainLoop(made, loss="mse", optimizer="adam", transport="mpi", steps_per_loop=4)
    x, y = data(24)
    source = tfdist.data.ArraySource((x, y), batch_size=6, shuffle=False)
    logs = loop.run(source, steps=8)
    assert loop.hook.transport.name == "mpi"
    return {"loss": logs["loss"], "weights": made.get_weights()}


@on_workers(2, stock=False)
def test_workers_that_mpi_did_not_start(job):
    with pytest.raises(tfdist.UsageError, match="not started under MPI; start the job with `tfdist launch --mpi"):
        trained(job, transport="mpi")
    hook = hooks.parse("allreduce")
    trained(job, hook, transport="auto")
    assert hook.transport.name == "collective"
    with pytest.raises(tfdist.UsageError, match="transport='nccl': choose one of auto, collective, mpi"):
        trained(job, transport="nccl")
