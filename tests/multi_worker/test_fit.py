"""Training on two and three workers against stock Keras on one device: the same numbers."""

import keras
import numpy as np
import tensorflow as tf

from tests.multi_worker.harness import on_workers
from tests.multi_worker.models import classifier, dense, labelled, outcome, regression, regressor, rows


@on_workers(2, 3)
def test_fit_with_validation(job):
    x, y = labelled(24)
    model = classifier(job)
    history = model.fit(
        x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, validation_data=(x[:9], y[:9]), validation_batch_size=5
    )
    return outcome(model, history)


@on_workers(2, 3)
def test_partial_batches(job):
    """13 = 5 + 5 + 3, then 10 = 4 + 4 + 2: with three workers one gets nothing of the last batch."""
    model = regressor(job)
    x, y = regression(13)
    first = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    x, y = regression(10)
    second = model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return outcome(model, first, second=second.history)


@on_workers(2, 3)
def test_batch_of_one_row(job):
    x, y = regression(5)
    model = regressor(job)
    return outcome(model, model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0))


@on_workers(2, 3)
def test_evaluate_counts_each_example_once(job):
    x, y = labelled(21)
    model = classifier(job)
    by_array = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    weighted = model.evaluate(x, y, batch_size=4, verbose=0, sample_weight=np.arange(21) % 3)
    by_dataset = model.evaluate(tf.data.Dataset.from_tensor_slices((x, y)).batch(5), verbose=0)
    return {"by_array": by_array, "weighted": weighted, "by_dataset": by_dataset}


class CountPositive(keras.metrics.Metric):
    """Counts labels above 0 in int32."""

    def __init__(self, name="positive"):
        super().__init__(name=name, dtype="int32")
        self.total = self.add_weight(name="total", initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true > 0, tf.int32)))

    def result(self):
        return self.total


@on_workers(2)
def test_metric_of_integers(job):
    x, y = labelled(21)
    with job.scope():
        model = dense(3)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[CountPositive()])
    model = job.prepare(model)
    counted = model.evaluate(x, y, batch_size=8, verbose=0)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {"counted": counted, "fitted": history.history["positive"]}


@on_workers(2)
def test_masked_loss(job):
    """30 valid tokens in the rows of worker 0, 3 in those of worker 1."""
    tokens = np.zeros((6, 10), "int32")
    tokens[:3] = np.arange(30).reshape(3, 10) % 6 + 1
    tokens[3:, 0] = [1, 2, 3]
    target = rows(60, 1).reshape(6, 10, 1)
    with job.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((10,), dtype="int32"),
                keras.layers.Embedding(
                    8, 4, mask_zero=True, embeddings_initializer=keras.initializers.RandomNormal(seed=3)
                ),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(4)),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", weighted_metrics=["mae"])
    model = job.prepare(model)
    return outcome(model, model.fit(tokens, target, batch_size=6, epochs=3, shuffle=False, verbose=0))


@on_workers(2)
def test_sample_and_class_weights(job):
    x, y = labelled(13)
    with job.scope():
        model = dense(3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.2), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    model = job.prepare(model)
    weights = np.where(np.arange(13) % 5 == 0, 9.0, 0.5).astype("float32")
    first = model.fit(x, y, sample_weight=weights, batch_size=5, epochs=2, shuffle=False, verbose=0)
    second = model.fit(x, y, class_weight={0: 1.0, 1: 4.0, 2: 0.25}, batch_size=5, shuffle=False, verbose=0)
    return outcome(model, first, second=second.history)


@on_workers(2)
def test_accumulated_micro_batches(job):
    model = regressor(job, accumulate_steps=3)
    x, y = regression(26)
    return outcome(model, model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@on_workers(2)
def test_clip_of_the_global_norm(job):
    x, y = regression(13)
    clip = 0.05  # far below the norm of each gradient
    if job.stock:
        model = regressor(job, lambda: keras.optimizers.SGD(1.0, global_clipnorm=clip))
    else:
        model = regressor(job, lambda: keras.optimizers.SGD(1.0), clip_global_norm=clip)
    history = model.fit(x, 30 * y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


@on_workers(2)
def test_clipping_in_the_optimizer(job):
    x, y = regression(13)
    found = {}
    for name, value in {"global_clipnorm": 0.05, "clipnorm": 0.02, "clipvalue": 0.01}.items():
        options = {name: value}
        model = regressor(job, lambda options=options: keras.optimizers.SGD(1.0, **options))
        model.fit(x, 30 * y, batch_size=5, epochs=1, shuffle=False, verbose=0)
        found[name] = model.get_weights()
    return found


@on_workers(2)
def test_sparse_gradients(job):
    tokens = (np.arange(26).reshape(13, 2) * 7 % 12).astype("int32")
    found = {}
    for name, options in {"plain": {}, "clipped": {"global_clipnorm": 0.01}}.items():
        with job.scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((2,), dtype="int32"),
                    keras.layers.Embedding(20, 3, embeddings_initializer=keras.initializers.RandomNormal(seed=3)),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(4)),
                ]
            )
            model.compile(keras.optimizers.Adam(0.05, **options), "mse")
        model = job.prepare(model)
        model.fit(tokens, regression(13)[1], batch_size=5, epochs=2, shuffle=False, verbose=0)
        found[name] = outcome(model)
    return found


@on_workers(2)
def test_synchronized_batch_normalization(job):
    """Equals one device where every replica has examples."""
    x, y = regression(14)
    with job.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.BatchNormalization(momentum=0.6, synchronized=True),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(4)),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model = job.prepare(model)
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    return outcome(model, history)


@on_workers(3)
def test_synchronized_batch_normalization_with_an_empty_replica(job):
    x, y = regression(7)
    with job.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.BatchNormalization(momentum=0.6, synchronized=True),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(4)),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model = job.prepare(model)
    return outcome(model, model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0))


@on_workers(2, stock=False)
def test_batch_normalization_of_each_replica(job):
    """Moving statistics are the mean of those of the replicas, weighted by their examples."""
    x, y = rows(5), rows(5, 1)
    with job.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model = job.prepare(model)
    model.fit(x, np.repeat(y, 3, 1), batch_size=5, shuffle=False, verbose=0)
    mean = (3 * x[:3].mean(0) + 2 * x[3:].mean(0)) / 5
    variance = (3 * x[:3].var(0) + 2 * x[3:].var(0)) / 5
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance.numpy(), variance, rtol=1e-4, atol=1e-6)
    return outcome(model)


@on_workers(2)
def test_infinite_row_on_the_second_worker_skips_the_step_on_both(job):
    x, y = regression(16)
    x[7] = np.inf  # the last row of the second batch of four
    model = regressor(job, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0))
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    found = outcome(model)
    assert np.isfinite(np.concatenate([w.ravel() for w in found["weights"]])).all()
    assert float(model.optimizer.dynamic_scale.numpy()) == 32.0
    return found


@on_workers(2)
def test_moving_average_of_weights(job):
    x, y = regression(13)
    model = regressor(job, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2))
    return outcome(model, model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0))


@on_workers(2)
def test_accumulation_in_the_optimizer(job):
    x, y = regression(13)
    model = regressor(job, lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    return outcome(model, model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0))


@on_workers(2)
def test_several_steps_in_one_call(job):
    """10 steps an epoch, 4 in one call: 4 + 4 + 2."""
    x, y = regression(39)
    with job.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], steps_per_execution=4)
    model = job.prepare(model)
    ends = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    assert job.stock or ends == [3, 7, 9] * 2, ends
    return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=4, verbose=0))


class TwoOptimizers(keras.Model):
    """Has a train_step of its own with an optimizer for each half."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(1))
        self.second = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
        self.first_optimizer = keras.optimizers.SGD(0.1)
        self.second_optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.05)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        for layer, optimizer in ((self.first, self.first_optimizer), (self.second, self.second_optimizer)):
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return {"loss": loss}


@on_workers(2)
def test_own_train_step_with_two_optimizers(job):
    x, y = regression(13)
    with job.scope():
        model = TwoOptimizers()
        model.compile(loss="mse")
    model = job.prepare(model)
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


class SumOfLosses(keras.Model):
    """Divides by the global batch itself and says that its losses and logs are parts of a sum."""

    distribute_reduction_method = "sum"

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(1))

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - self(x, training=True))) / 5.0
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return {"part": loss}


@on_workers(2)
def test_own_train_step_whose_logs_are_summed(job):
    x, y = regression(10)
    with job.scope():
        model = SumOfLosses()
        model.compile(keras.optimizers.SGD(0.1))
    model = job.prepare(model)
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


@on_workers(2)
def test_scalar_loss_and_regularizer(job):
    x, y = regression(13)
    with job.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(
                    1, kernel_initializer=keras.initializers.GlorotUniform(1), kernel_regularizer="l2", name="out"
                ),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), lambda y, y_pred: tf.reduce_mean(tf.square(y - y_pred)))
    model = job.prepare(model)
    return outcome(model, model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0))


@on_workers(2)
def test_predict_gives_all_rows_in_order_on_every_worker(job):
    x = rows(100)
    model = regressor(job)
    found = {"arrays": model.predict(x, batch_size=8, verbose=0)}
    found["dataset"] = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(7), verbose=0)
    found["batch"] = model.predict_on_batch(x[:5])
    return found


@on_workers(2)
def test_predict_on_the_chief_only(job):
    """The other worker does not take part and is not waited for."""
    model = regressor(job)
    x, y = regression(12)
    own_rows = model.predict(x, batch_size=5, verbose=0) if job.chief else None
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return {**outcome(model), "own_rows": own_rows}


@on_workers(2)
def test_train_and_test_on_batch(job):
    x, y = labelled(13)
    model = classifier(job)
    logs = []
    for run, part, weights in (
        (model.train_on_batch, slice(0, 5), {}),
        (model.train_on_batch, slice(5, 6), {}),  # the second worker gets nothing
        (model.train_on_batch, slice(6, 13), {"sample_weight": np.arange(7.0)}),
        (model.train_on_batch, slice(6, 13), {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}),
        (model.test_on_batch, slice(0, 13), {}),
    ):
        model.reset_metrics()  # Keras 3.12 does not do so by itself
        logs.append(run(x[part], y[part], **weights, return_dict=True))
    return outcome(model, logs=logs)
