"""Hooks between real workers, where conditions communicate on one branch only."""

import keras
import numpy as np
import pytest

import tfdist
from tests.multi_worker.harness import on_workers
from tfdist import hooks
from tfdist.training.checkpoint import newest_checkpoint
from tfdist.training.save_callback import SaveCheckpoints


def trained(job, hook, epochs=2, optimizer="adam", callbacks=(), seed=7):
    with job.scope():
        keras.utils.set_random_seed(seed)
        optimizer = optimizer if isinstance(optimizer, str) else optimizer()
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dense(2),
            ]
        )
        model.compile(optimizer, "mse")
    job.prepare(model, hook=hook)
    x, y = data()
    history = model.fit(x, y, batch_size=6, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, history.history["loss"]


def data():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(22, 3)).astype("float32")
    return x, np.tanh(x @ rng.normal(size=(3, 2))).astype("float32")


@on_workers(2, 3)
def test_small_buckets_are_exact(job):
    model, losses = trained(job, "allreduce:bucket_mb=0.0005")
    return {"weights": model.get_weights(), "losses": losses}


@on_workers(2, 3, stock=False)
def test_lossy_hooks_learn_and_workers_agree(job):
    found = {}
    for spec in ("bf16", "fp16", "int8", "topk:ratio=0.2", "powersgd:rank=2", "powersgd:rank=2,start_step=3"):
        hook = hooks.parse(spec)
        model, losses = trained(job, hook, epochs=20, optimizer=lambda: keras.optimizers.Adam(0.05))
        assert losses[-1] < 0.5 * losses[0], (spec, losses)
        assert 0 < hook.report.bytes_per_step < hook.report.dense_bytes_per_step, (spec, hook.report)
        found[spec] = model.get_weights()
    return found


@on_workers(2)
def test_steps_before_the_start_are_exact(job):
    """Nine steps of nine: the condition takes the exact branch on every worker."""
    first, _ = trained(job, "powersgd:rank=1,start_step=8")
    second, _ = trained(job, "local_sgd:period=4,start_step=100")
    return {"powersgd": first.get_weights(), "local_sgd": second.get_weights()}


@on_workers(2)
def test_local_sgd_that_averages_every_step_is_exact_with_sgd(job):
    model, losses = trained(job, "local_sgd:period=1", optimizer=lambda: keras.optimizers.SGD(0.1))
    return {"weights": model.get_weights()}


@on_workers(2, stock=False)
def test_local_sgd_meets_at_every_period(job):
    """Eight steps with a period of 4: the workers have just met; after six they have not."""
    met, _ = trained(job, "local_sgd:period=4", optimizer=lambda: keras.optimizers.SGD(0.1))
    apart, _ = trained(job, "local_sgd:period=3", optimizer=lambda: keras.optimizers.SGD(0.1))
    return {"met": met.get_weights(), "own_apart": apart.get_weights()}


@on_workers(2, stock=False)
def test_samples_of_the_exact_sum(job):
    hook = hooks.parse("topk:ratio=0.3,sample_every=3")
    trained(job, hook)
    assert 0.3 < hook.report.cosine < 1 and 0 < hook.report.relative_error < 1.5
    faithful = hooks.parse("bf16:sample_every=3")
    trained(job, faithful)
    assert faithful.report.cosine > 0.9999
    return {"cosine": hook.report.cosine, "error": hook.report.relative_error}


@on_workers(2, stock=False)
def test_state_of_every_worker_is_resumed(job):
    """Bit for bit, with what each worker has left out."""
    unbroken, _ = trained(job, "topk:ratio=0.2", epochs=3)
    folder = job.folder / "kept"
    trained(job, "topk:ratio=0.2", epochs=2, callbacks=[SaveCheckpoints(folder)])
    resumed, _ = trained(job, "topk:ratio=0.2", epochs=3, callbacks=[SaveCheckpoints(folder, resume="must")], seed=99)
    for a, b in zip(resumed.get_weights(), unbroken.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@on_workers(2, stock=False)
def test_a_fit_within_the_scope_saves(job):
    """The chief alone prepares its saves: a variable that it made in the scope would wait for the other workers."""
    x, y = data()
    with job.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        job.prepare(model).fit(x, y, batch_size=6, verbose=0, callbacks=[SaveCheckpoints(job.folder / "scope")])
    if job.chief:
        assert newest_checkpoint(job.folder / "scope").step == -(-len(x) // 6)
    return {"weights": model.get_weights()}


@on_workers(2, stock=False)
def test_a_value_that_is_not_finite_on_one_worker_skips_the_step_on_both(job):
    for hook in ("allreduce", "bf16", "int8", "topk:ratio=0.3", "powersgd:rank=2"):
        x, y = data()
        x[5] = np.inf  # of the second worker's half of the first batch
        with job.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(16), keras.layers.Dense(2)])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0), "mse")
        job.prepare(model, hook=hook)
        before = model.get_weights()
        model.fit(x[:6], y[:6], batch_size=6, shuffle=False, verbose=0)
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        model.fit(x[6:], y[6:], batch_size=6, shuffle=False, verbose=0)
        assert all(np.isfinite(w).all() for w in model.get_weights()), hook
    return {"weights": model.get_weights()}


@on_workers(2, stock=False)
def test_workers_with_loss_scaling_cannot_train_by_themselves(job):
    with pytest.raises(tfdist.UsageError, match="loss scaling"):
        trained(job, "local_sgd", optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
