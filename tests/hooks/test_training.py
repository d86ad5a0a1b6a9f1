"""Hooks in real training: in every loop, with everything else that a step may do, and through checkpoints."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import hooks
from tfdist.data import ArraySource
from tfdist.training.save_callback import SaveCheckpoints

LOSSY = ("bf16", "fp16", "int8", "topk:ratio=0.2", "powersgd:rank=2", "local_sgd:period=2")


def data(rows=23):
    rng = np.random.default_rng(4)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def dense(optimizer=lambda: keras.optimizers.Adam(0.02)):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, "tanh"),
            keras.layers.Dense(16, "tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer(), "mse")
    return model


def fit(model, epochs=2):
    return model.fit(*data(), batch_size=5, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize("bucket_mb", [1e-6, 3e-4, 4.0])
def test_any_bucket_size_gives_the_numbers_of_one_device(parity, bucket_mb, monkeypatch):
    # On CPU devices of one process gradients travel one by one; here they have to lie in buckets.
    monkeypatch.setattr(hooks.AllReduce, "bucket_bytes", hooks.BucketedHook.bucket_bytes)
    parity.check(
        lambda: dense(lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.5)),
        fit,
        on=("mirrored2", "mirrored3"),
        hook=f"allreduce:bucket_mb={bucket_mb}",
        accumulate_steps=2,
    )


class OneHotEmbedding(keras.layers.Embedding):
    """The same numbers forward; the gradient is dense."""

    def call(self, inputs):
        return keras.ops.one_hot(inputs, self.input_dim) @ self.embeddings


@pytest.mark.parametrize(
    ("hook", "stock_layer"),
    [
        (None, keras.layers.Embedding),
        # Lossy hooks send the whole of so small a table, and Adam then sees each row's sum once.
        ("bf16", OneHotEmbedding),
        ("topk:ratio=1", OneHotEmbedding),
        ("powersgd:rank=4", OneHotEmbedding),
    ],
)
def test_sparse_gradients(parity, hook, stock_layer):
    vocabulary = 8  # so that rows occur more than once
    rng = np.random.default_rng(0)
    x, y = rng.integers(vocabulary, size=(24, 5)), rng.normal(size=(24, 2)).astype("float32")

    def build(layer=keras.layers.Embedding):
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layer(vocabulary, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.Adam(0.02), "mse")
        return model

    def train(model):
        return model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)

    bounds = {"rtol": 0.02, "atol": 0.005} if hook == "bf16" else {}
    parity.check(build, train, stock_build=lambda: build(stock_layer), on=("mirrored2",), hook=hook, **bounds)


@pytest.mark.slow
@pytest.mark.parametrize("hook", LOSSY)
def test_lossy_hooks_learn(strategies, hook):
    losses = {}
    for name, spec in (("exact", None), ("lossy", hook)):
        with strategies["mirrored2"].scope():
            keras.utils.set_random_seed(3)
            model = dense()
        tfdist.prepare(model, hook=spec)
        losses[name] = fit(model, epochs=30).history["loss"]
    assert losses["lossy"][-1] < 0.1 * losses["lossy"][0]
    assert losses["exact"][-1] < losses["lossy"][0] / 20


@pytest.mark.parametrize(
    "hook", ["fp16", "int8", "powersgd:rank=2,start_step=4", "topk:ratio=0.2", "local_sgd:period=4"]
)
@pytest.mark.parametrize("stop", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_training_goes_on_bit_for_bit(strategies, tmp_path, hook, stop):
    optimizer = lambda: keras.optimizers.Adam(0.02)  # noqa: E731
    if "local_sgd" in hook:
        # Where the replicas have just been averaged; between, and of moments, a checkpoint has the chief's.
        stop = 4 * (stop // 3)
        optimizer = lambda: keras.optimizers.SGD(0.1)  # noqa: E731

    def run(folder=None, stop=None, seed=5):
        with strategies["mirrored2"].scope():
            keras.utils.set_random_seed(seed)
            model = dense(optimizer)
        tfdist.prepare(model, hook=hook)
        callbacks = [SaveCheckpoints(folder)] if folder else []
        if stop:

            def end(batch, logs):
                model.stop_training = model.fit.__self__.runner.steps_done >= stop

            callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=end))
        model.fit(*data(), batch_size=5, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    unbroken = run()
    run(tmp_path, stop)
    resumed = run(tmp_path, seed=99)
    for a, b in zip(resumed.variables, unbroken.variables, strict=True):
        if "metric" not in a.path and "loss" not in a.path:
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


def test_what_was_left_out_is_kept_at_another_number_of_replicas(strategies, tmp_path):
    def run(name, epochs):
        with strategies[name].scope():
            keras.utils.set_random_seed(5)
            model = dense()
        hook = hooks.parse("topk:ratio=0.1")
        tfdist.prepare(model, hook=hook)
        model.fit(*data(), batch_size=5, epochs=epochs, verbose=0, callbacks=[SaveCheckpoints(tmp_path)])
        local = [strategies[name].experimental_local_results(state.variable) for state in hook.state]
        return [np.stack([copy.numpy() for copy in copies]) for copies in local]

    saved = run("mirrored2", 1)
    assert sum(np.abs(part).sum() for part in saved) > 0
    for name, replicas in (("mirrored4", 4), ("mirrored3", 3), ("mirrored2", 2)):
        for before, now in zip(saved, run(name, 1), strict=True):
            assert len(now) == replicas
            np.testing.assert_allclose(now.sum(0), before.sum(0), rtol=1e-5, atol=1e-7)
            if replicas == 2:
                np.testing.assert_array_equal(now, before)


class Doubling(hooks.Hook):
    """A hook as a user writes it: sums, and doubles."""

    name = "doubling"

    def aggregate(self, gradients, variables):
        return [2.0 * self.transport.all_reduce(gradient) for gradient in gradients]


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_hook_of_the_users_works_in_every_loop(strategies):
    """Twice the gradient with half the learning rate is the same step."""
    strategy = strategies["mirrored2"]

    def weights(hook, rate, kind):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = OwnStep() if kind == "own" else dense()
            model.compile(keras.optimizers.SGD(rate), "mse")
        if kind == "loop":
            loop = tfdist.TrainLoop(model, loss="mse", optimizer=keras.optimizers.SGD(rate), hook=hook)
            loop.run(ArraySource(data(), batch_size=5, shuffle=False), steps=8)
        else:
            tfdist.prepare(model, hook=hook)
            fit(model)
        return model.get_weights()

    for kind in ("fit", "loop", "own"):
        for a, b in zip(weights(Doubling(), 0.05, kind), weights(None, 0.1, kind), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_local_sgd_averages_the_weights(strategies):
    """By hand: two replicas take two steps of SGD on their own halves of each batch, then meet."""
    strategy = strategies["mirrored2"]
    x, y = data(12)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    start = model.get_weights()[0].astype("float64")
    tfdist.prepare(model, hook="local_sgd:period=2")
    model.fit(x, y, batch_size=6, epochs=1, shuffle=False, verbose=0)

    def trained(rows):
        kernel = start.copy()
        for batch in range(2):
            a, b = (part[6 * batch : 6 * batch + 6][rows] for part in (x, y))
            kernel -= 0.1 * 2 * a.T @ (a @ kernel - b) / b.size
        return kernel

    expected = (trained(slice(0, 3)) + trained(slice(3, 6))) / 2
    for copy in strategy.experimental_local_results(model.layers[0].kernel.value):
        np.testing.assert_allclose(copy.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_local_sgd_starts_late_and_refuses_loss_scaling(strategies, parity):
    parity.check(dense, fit, on=("mirrored2",), hook="local_sgd:period=4,start_step=20")
    with strategies["mirrored2"].scope():
        model = dense(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    tfdist.prepare(model, hook="local_sgd")
    with pytest.raises(tfdist.UsageError, match="local_sgd.*loss scaling.*mixed_bfloat16"):
        fit(model)


def test_noop_says_what_it_is(strategies, caplog):
    with strategies["mirrored2"].scope():
        model = dense()
    tfdist.prepare(model, hook="noop")
    with caplog.at_level("WARNING", logger="tfdist"):
        fit(model)
    assert "GRADIENTS ARE NOT AGGREGATED" in caplog.text
    first, second = strategies["mirrored2"].experimental_local_results(model.layers[0].kernel.value)
    assert np.abs(first.numpy() - second.numpy()).max() > 0


@pytest.mark.parametrize("hook", ["allreduce", "bf16", "fp16", "int8", "topk:ratio=0.5", "powersgd:rank=2"])
def test_an_overflow_on_one_replica_skips_the_step_on_all(strategies, hook):
    strategy = strategies["mirrored2"]
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = dense(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0))
    tfdist.prepare(model, hook=hook)
    x, y = data(10)
    model.fit(x, y, batch_size=10, epochs=1, verbose=0)
    before = model.get_weights()
    broken = x.copy()
    broken[7] = np.inf  # on the second replica
    model.fit(broken, y, batch_size=10, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    scale = strategy.experimental_local_results(model.optimizer.dynamic_scale.value)
    assert [float(copy) for copy in scale] == [32.0, 32.0]
    model.fit(x, y, batch_size=10, epochs=1, verbose=0)
    for variable in model.weights:
        first, second = strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(first.numpy(), second.numpy())
        assert np.isfinite(first.numpy()).all()
