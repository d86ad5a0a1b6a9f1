"""`TrainLoop` on workers: the same numbers as stock Keras on one device, validation, callbacks, checkpoints."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.harness import on_workers
from tests.multi_worker.models import dense, labelled, numbers, regression
from tests.multi_worker.test_data import own_shards
from tfdist.data import ArraySource
from tfdist.errors import UsageError
from tfdist.training.loop import TrainLoop


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loop(job, **options):
    """Returns a loop for `labelled`."""
    with job.scope():
        model = dense(3)
    options = {"optimizer": "adam", "metrics": ["accuracy"], **options}
    return TrainLoop(model, loss=cross_entropy(), **options)


@on_workers(2, 3)
def test_run_and_evaluate(job):
    """Two epochs of 5 + 5 + 3 rows, as one run of six steps, three steps in one call."""
    x, y = labelled(13)
    if job.stock:
        model = dense(3)
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        return {"weights": model.get_weights(), "evaluated": model.evaluate(x, y, verbose=0, return_dict=True)}
    trained = loop(job, steps_per_loop=3)
    trained.run(ArraySource((x, y), batch_size=5, shuffle=False), steps=6)
    assert trained.step == 6 and (trained.position.epoch, trained.position.step) == (2, 0), trained.position
    found = trained.evaluate(ArraySource((x, y), batch_size=4, shuffle=False))
    return {"weights": trained.model.get_weights(), "evaluated": found}


@on_workers(2)
def test_the_logs_are_those_of_the_steps_since_the_last_call(job):
    x, y = labelled(24)
    if job.stock:
        model = dense(3)
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
        parts = [model.fit(x[i : i + 8], y[i : i + 8], batch_size=4, shuffle=False, verbose=0) for i in (0, 8, 16)]
        return {"logs": [{k: v[0] for k, v in part.history.items()} for part in parts]}
    states = []
    trained = loop(job, optimizer="sgd", steps_per_loop=2)
    trained.run(ArraySource((x, y), batch_size=4, shuffle=False), steps=6, callbacks=[states.append])
    assert [state.step for state in states] == [2, 4, 6]
    return {"logs": [state.logs for state in states]}


@on_workers(2, stock=False)
def test_validation_and_checkpoints_at_their_steps(job):
    source = ArraySource(labelled(14), batch_size=5, shuffle=True, seed=3)
    trained = loop(job, steps_per_loop=4)
    trained.build(source)
    checkpoints = trained.checkpoints(job.folder, keep=2)
    seen = []
    trained.run(
        source,
        steps=10,
        validation=ArraySource(labelled(7), batch_size=3, shuffle=False),
        validate_every=4,
        checkpoints=checkpoints,
        checkpoint_every=3,
        callbacks=[lambda state: seen.append((state.step, bool(state.validation)))],
    )
    trained.evaluate(source)  # all workers: the chief has written when this ends
    assert [step for step, validated in seen if validated] == [4, 8, 10], seen
    assert sorted(path.name for path in job.folder.iterdir()) == ["step-00000009", "step-00000010"]
    return {"weights": trained.model.get_weights(), "steps": [step for step, _ in seen]}


@on_workers(2, stock=False)
def test_callback_of_one_worker_ends_the_run_of_all(job):
    trained = loop(job, steps_per_loop=2)
    trained.run(
        ArraySource(labelled(40), batch_size=4),
        steps=100,
        callbacks=[lambda state: job.index == 1 and state.step >= 6],
    )
    assert trained.step == 6, trained.step
    return {"weights": trained.model.get_weights()}


@on_workers(2, stock=False)
def test_resume_in_the_middle_of_an_epoch_is_exact(job):
    """A second loop goes on from the checkpoint of step 7 of an epoch of 5; bit for bit the unbroken run."""
    x, y = labelled(23)

    def make():
        with job.scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((3,)),
                    keras.layers.Dropout(0.3, seed=4),
                    keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(1)),
                ]
            )
        made = TrainLoop(model, loss=cross_entropy(), optimizer="adam", steps_per_loop=2)
        made.build(ArraySource((x, y), batch_size=5, seed=9))
        return made

    unbroken = make()
    unbroken.run(ArraySource((x, y), batch_size=5, seed=9), steps=13)
    first = make()
    first.run(ArraySource((x, y), batch_size=5, seed=9), steps=7, checkpoints=first.checkpoints(job.folder))
    second = make()
    assert second.resume(second.checkpoints(job.folder), "must")
    assert second.step == 7
    second.run(ArraySource((x, y), batch_size=5, seed=9), steps=6)
    for a, b in zip(second.model.variables, unbroken.model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    for a, b in zip(second.model.optimizer.variables, unbroken.model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@on_workers(2)
def test_own_shards_of_unequal_length(job):
    """auto_shard_policy OFF: worker 1 has four batches of an epoch, worker 0 six."""
    x, y = regression(22)
    data = own_shards(job, x, y)
    if job.stock:
        model = dense()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(data, epochs=2, verbose=0)
        return {"weights": model.get_weights(), "loss": model.evaluate(data, verbose=0)}
    with job.scope():
        model = dense()
    trained = TrainLoop(model, loss="mse", optimizer=keras.optimizers.SGD(0.1), steps_per_loop=4)
    trained.run(data, steps=12)
    assert trained.position.epoch == 2, trained.position
    return {"weights": model.get_weights(), "loss": trained.evaluate(data)["loss"]}


@on_workers(2, stock=False)
def test_data_that_differ_are_refused_on_all_workers(job):
    x, y = labelled(16)
    with pytest.raises(UsageError, match="differs between the workers"):
        loop(job).run((x + job.index, y), steps=2)
    data = tf.data.Dataset.from_tensor_slices((x + job.index, y)).batch(4)
    with pytest.raises(UsageError, match="the first global batch differs between the workers"):
        loop(job).run(data, steps=2)
    with pytest.raises(UsageError, match="differs between the workers"):
        loop(job).evaluate(data)


@on_workers(2)
def test_loss_of_sums_and_counts(job):
    """A pair (sum, count): the mean over all tokens, wherever they are."""
    lengths = np.array([9, 8, 7, 1, 1, 2])
    x = np.random.default_rng(1).normal(size=(6, 9, 3)).astype("float32")
    y = (np.arange(9) < lengths[:, None]).astype("float32")[..., None]

    def loss(y_true, y_pred):
        errors = tf.square(y_pred - 1.0) * y_true
        return tf.reduce_sum(errors), tf.reduce_sum(y_true)

    def model():
        return keras.Sequential(
            [
                keras.layers.Input((9, 3)),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(1)),
            ]
        )

    if job.stock:
        made = model()
        made.compile(keras.optimizers.SGD(0.1), lambda y, p: tf.divide(*loss(y, p)))
        made.fit(x, y, batch_size=6, epochs=3, shuffle=False, verbose=0)
        return {"weights": made.get_weights()}
    with job.scope():
        made = model()
    trained = TrainLoop(made, loss=loss, optimizer=keras.optimizers.SGD(0.1), accumulate_steps=2)
    trained.run(ArraySource((x, y), batch_size=6, shuffle=False), steps=3)
    return {"weights": made.get_weights()}


@on_workers(2, stock=False)
def test_every_example_once_an_epoch(job):
    with job.scope():
        model = keras.Sequential(
            [keras.layers.Input((1,), dtype="int32"), keras.layers.Embedding(23, 1, embeddings_initializer="zeros")]
        )
    summed = TrainLoop(
        model,
        loss=keras.losses.MeanAbsoluteError(reduction="sum"),
        optimizer=keras.optimizers.SGD(1.0),
        steps_per_loop=4,
    )
    x = numbers(23)
    target = np.full((23, 1, 1), 1000.0, "float32")
    source = ArraySource((x, target), batch_size=5)
    for epochs in (1, 2):
        summed.run(source, steps=5)
        np.testing.assert_array_equal(model.get_weights()[0][:, 0], epochs)
