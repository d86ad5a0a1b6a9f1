"""Several replicas on each of several workers: two workers with two CPU devices each."""

import keras
import numpy as np
import pytest

import tfdist
from tests.multi_worker.harness import on_workers
from tfdist import hooks
from tfdist.training.save_callback import SaveCheckpoints

pytestmark = pytest.mark.slow


def data(rows=22):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return x, np.tanh(x @ rng.normal(size=(3, 2))).astype("float32")


def trained(job, hook=None, epochs=2, optimizer="adam", callbacks=(), seed=7, **options):
    with job.scope():
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((3,))
        x = keras.layers.Dense(16, "tanh")(keras.layers.Dense(16, "tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(x))
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), "mse", metrics=["mae"])
    job.prepare(model, hook=hook, **options)
    x, y = data()
    history = model.fit(
        x, y, batch_size=6, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), validation_data=(x, y)
    )
    return model, history.history


@on_workers(2, devices=2)
def test_fit_with_a_last_batch_that_is_not_full(job):
    model, history = trained(job)
    if not job.stock:
        assert job.strategy.num_replicas_in_sync == 4
    return {"weights": model.get_weights(), "history": history, "evaluated": model.evaluate(*data(), verbose=0)}


@on_workers(2, devices=2)
def test_hierarchical_sums_are_exact(job):
    model, history = trained(job, "allreduce:bucket_mb=0.0005,hierarchical=1")
    return {"weights": model.get_weights(), "history": history}


@on_workers(2, devices=2)
def test_sparse_gradients_of_unequally_many_rows(job):
    found = {}
    for hook in ("allreduce", "allreduce:hierarchical=1"):
        with job.scope():
            keras.utils.set_random_seed(3)
            tokens = keras.Input((3,), dtype="int32")
            x = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(tokens))
            model = keras.Model(tokens, keras.layers.Dense(1)(x))
            model.compile("adam", "mse")
        job.prepare(model, hook=hook)
        ids = np.random.default_rng(1).integers(0, 20, size=(7, 3))
        model.fit(ids, ids.sum(axis=1, keepdims=True) / 20.0, batch_size=5, epochs=3, shuffle=False, verbose=0)
        found[hook] = model.get_weights()
    return found


@on_workers(2, devices=2, stock=False)
def test_lossy_hooks_between_workers_learn_and_send_less(job):
    found = {}
    for spec in ("bf16", "fp16", "int8", "topk:ratio=0.2", "powersgd:rank=2", "powersgd:rank=2,start_step=3"):
        flat, levels = (hooks.parse(s) for s in (spec, f"{spec}{',' if ':' in spec else ':'}hierarchical=1"))
        for hook in (flat, levels):
            model, history = trained(job, hook, epochs=20, optimizer=lambda: keras.optimizers.Adam(0.05))
            assert history["loss"][-1] < 0.5 * history["loss"][0], (hook.name, history["loss"])
            found[f"{spec} {type(hook).__name__}"] = model.get_weights()
        # Of four replicas each sends 3/2 of a sum and three times what is gathered, of two workers once each.
        assert levels.report.bytes_per_step < 0.7 * flat.report.bytes_per_step, (levels.report, flat.report)
    return found


@on_workers(2, devices=2, stock=False)
def test_a_value_that_is_not_finite_on_one_replica_skips_the_step_on_all(job):
    for hook in ("bf16:hierarchical=1", "int8:hierarchical=1", "topk:ratio=0.3,hierarchical=1"):
        x, y = data(8)
        x[7] = np.inf  # of the last replica's quarter
        with job.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(16), keras.layers.Dense(2)])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0), "mse")
        job.prepare(model, hook=hook)
        before = model.get_weights()
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        model.fit(x[:7], y[:7], batch_size=7, shuffle=False, verbose=0)
        assert all(np.isfinite(w).all() for w in model.get_weights()), hook
    return {"weights": model.get_weights()}


@on_workers(2, devices=2, stock=False)
def test_state_is_resumed(job):
    """Bit for bit, with what each worker has left out."""
    spec = "topk:ratio=0.2,hierarchical=1,sample_every=2"
    unbroken, _ = trained(job, spec, epochs=3)
    folder = job.folder / "kept"
    trained(job, spec, epochs=2, callbacks=[SaveCheckpoints(folder)])
    resumed, _ = trained(job, spec, epochs=3, callbacks=[SaveCheckpoints(folder, resume="must")], seed=99)
    for a, b in zip(resumed.get_weights(), unbroken.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@on_workers(2, devices=2)
def test_the_custom_loop_with_accumulation(job):
    if job.stock:
        model, _ = trained(job, epochs=1)
        return {"weights": model.get_weights()}
    with job.scope():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((3,))
        x = keras.layers.Dense(16, "tanh")(keras.layers.Dense(16, "tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(x))
    loop = tfdist.TrainLoop(model, loss="mse", optimizer="adam", accumulate_steps=2, steps_per_loop=3)
    loop.run(tfdist.data.ArraySource(data(), batch_size=6, shuffle=False), steps=4)
    return {"weights": model.get_weights()}
