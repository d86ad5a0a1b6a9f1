"""The kinds of input that `fit` takes, on two and three workers: every example once, the same global batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.harness import on_workers
from tests.multi_worker.models import Counter, classifier, labelled, numbers, outcome, regression, regressor
from tfdist.errors import UsageError


@on_workers(2, 3, stock=False)
def test_arrays_of_101_examples(job):
    """Each worker is given all of them; shuffled, in batches of 10."""
    counter = Counter(job, 101)
    x = numbers(101)
    counts = counter.fit(x, x, batch_size=10, epochs=3)
    assert counts == [[1] * 101] * 3, counts
    assert counter.steps == [11] * 3, counter.steps


@on_workers(2, stock=False)
def test_example_counter_notices(job):
    """The counter that the tests here rely on sees what is used twice and what is left out."""
    counter = Counter(job, 6)
    x = np.array([[0], [1], [1], [3], [4], [4], [4]], "int32")
    assert counter.fit(x, x, batch_size=4) == [[1, 2, 0, 1, 3, 0]]


@on_workers(2, 3, stock=False)
def test_shuffled_dataset_without_a_seed(job):
    """The workers agreed on a seed when the strategy was made, so their pipelines are the same."""
    counter = Counter(job, 101)
    x = numbers(101)
    data = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(101).batch(10)
    counts = counter.fit(data, epochs=3)
    assert counts == [[1] * 101] * 3, counts
    assert counter.steps == [11] * 3, counter.steps


@on_workers(2, 3)
def test_dataset(job):
    x, y = labelled(23)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    model = classifier(job)
    return outcome(model, model.fit(data, epochs=2, verbose=0, validation_data=data.take(2)))


@on_workers(2)
def test_dataset_with_steps_per_epoch_goes_on_where_it_stopped(job):
    x, y = regression(40)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    model = regressor(job)
    finite = model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)
    endless = model.fit(data.repeat(), epochs=2, steps_per_epoch=7, verbose=0)
    return outcome(model, finite, endless=endless.history)


@on_workers(2)
def test_dataset_of_unknown_length(job):
    x, y = regression(21)
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: x[0] > -10.0).batch(4)
    model = regressor(job)
    history = model.fit(data, epochs=2, verbose=0)
    # Stock Keras counts a step too many at the end of the data.
    return {"weights": model.get_weights(), "history": history.history, "evaluated": model.evaluate(data, verbose=0)}


@on_workers(2, stock=False)
def test_datasets_that_differ_are_refused_on_all_workers(job):
    x, y = regression(16, seed=5 + job.index)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with pytest.raises(UsageError, match="the first global batch differs between the workers .*worker 0: .*worker 1: "):
        regressor(job).fit(data, verbose=0)
    shuffled = tf.data.Dataset.from_tensor_slices(regression(16)).shuffle(16, seed=job.index).batch(4)
    with pytest.raises(UsageError, match="shuffle"):
        regressor(job).fit(shuffled, verbose=0)


@on_workers(2, stock=False)
def test_dataset_of_another_length_on_each_worker_is_refused(job):
    x, y = regression(16 + 4 * job.index)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with pytest.raises(UsageError, match="differs between the workers"):
        regressor(job).fit(data, verbose=0)


@on_workers(2, stock=False)
def test_arrays_that_differ_are_refused_on_all_workers(job):
    x, y = regression(16, seed=5 + job.index)
    with pytest.raises(UsageError, match="differs between the workers"):
        regressor(job).fit(x, y, batch_size=4, verbose=0)


@on_workers(2, stock=False)
def test_arrays_of_another_length_on_each_worker_are_refused(job):
    x, y = regression(16 + 4 * job.index)
    with pytest.raises(UsageError, match="differs between the workers"):
        regressor(job).fit(x, y, batch_size=4, verbose=0)


def own_shards(job, x, y):
    """Returns this worker's part: of batches of 4, worker 0 has 3 rows and worker 1 has 1; then only worker 0 has any.

    The stock run gets the global batches of both.
    """
    shared, rest = x[:16].reshape(4, 4, -1), x[16:].reshape(2, 3, -1)
    shared_y, rest_y = y[:16].reshape(4, 4, -1), y[16:].reshape(2, 3, -1)

    def batches(of_shared, of_rest):
        for part in (shared[:, of_shared], shared_y[:, of_shared]):
            assert part.ndim == 3
        yield from zip(shared[:, of_shared], shared_y[:, of_shared], strict=True)
        if of_rest:
            yield from zip(rest, rest_y, strict=True)

    picks = (slice(None), True) if job.stock else ((slice(0, 3), True), (slice(3, 4), False))[job.index]
    spec = (tf.TensorSpec([None, x.shape[1]], x.dtype), tf.TensorSpec([None, y.shape[1]], y.dtype))
    data = tf.data.Dataset.from_generator(lambda: batches(*picks), output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(6 if picks[1] else 4))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


@on_workers(2)
def test_own_shards_of_unequal_length(job):
    """auto_shard_policy OFF: worker 1 has four batches, worker 0 six."""
    x, y = regression(22)
    data = own_shards(job, x, y)
    model = regressor(job)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data)
    return outcome(model, history, evaluated=model.evaluate(data, verbose=0))


@on_workers(2, stock=False)
def test_own_shards_are_used_once(job):
    counter = Counter(job, 22)
    x = numbers(22)
    counts = counter.fit(own_shards(job, x, x), epochs=2)
    assert counts == [[1] * 22] * 2, counts
    assert counter.steps == [6, 6], counter.steps


@on_workers(2, stock=False)
def test_own_shards_of_unknown_length_are_refused(job):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.from_tensor_slices(regression(16)).filter(lambda x, y: True).batch(4).with_options(options)
    with pytest.raises(UsageError, match="steps_per_epoch"):
        regressor(job).fit(data, verbose=0)


@on_workers(2, stock=False)
def test_own_shards_with_steps_per_epoch(job):
    """Each worker repeats its own shard for ever; the number of steps is given."""
    counter = Counter(job, 12)
    x = numbers(12)[job.index :: 2]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(2).repeat().with_options(options)
    counts = counter.fit(data, epochs=2, steps_per_epoch=3)
    assert counts == [[1] * 12] * 2, counts


@on_workers(2)
def test_generator(job):
    """Exactly as many batches as are asked for."""
    x, y = regression(24)
    model = regressor(job)
    batches = ((x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4))
    exact = model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0)
    until_the_end = model.fit(((x[i : i + 5], y[i : i + 5]) for i in range(0, 24, 5)), verbose=0)
    return {"weights": model.get_weights(), "exact": exact.history, "until_the_end": until_the_end.history}


class Batches(keras.utils.PyDataset):
    """Rows in batches of four; counts the epochs that it is told of."""

    def __init__(self, x, y, **options):
        super().__init__(**options)
        self.x, self.y, self.ended = x, y, 0

    def __len__(self):
        return -(-len(self.x) // 4)

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.ended += 1


@on_workers(2)
def test_py_dataset_in_order(job):
    data = Batches(*regression(18), workers=2)
    model = regressor(job)
    history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert job.stock or data.ended == 2, data.ended
    return outcome(model, history, predicted=model.predict(data, verbose=0))


@on_workers(2, stock=False)
def test_py_dataset_shuffled(job):
    """Its batches come in another order each epoch, the same one on all workers."""
    counter = Counter(job, 18)
    x = numbers(18)
    orders = []

    class Watched(Batches):
        def __getitem__(self, index):
            orders.append(index)
            return super().__getitem__(index)

    counts = counter.fit(Watched(x, x), epochs=3, shuffle=True)
    assert counts == [[1] * 18] * 3, counts
    epochs = [orders[-15 + 5 * i :][:5] for i in range(3)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs), orders
    assert len({tuple(epoch) for epoch in epochs}) > 1, orders
    return {"orders": epochs}


@on_workers(2)
def test_validation_split_and_dict_inputs(job):
    x, y = regression(21)
    with job.scope():
        first, second = keras.layers.Input((2,), name="first"), keras.layers.Input((1,), name="second")
        init = keras.initializers.GlorotUniform(1)
        joined = keras.layers.Concatenate()([first, second])
        outputs = {
            "a": keras.layers.Dense(1, kernel_initializer=init, name="a")(joined),
            "b": keras.layers.Dense(1, kernel_initializer=init, name="b")(joined),
        }
        model = keras.Model({"first": first, "second": second}, outputs)
        model.compile(
            keras.optimizers.SGD(0.05),
            {"a": "mse", "b": "mae"},
            loss_weights={"a": 1.0, "b": 0.3},
            metrics={"a": ["mae"]},
        )
    model = job.prepare(model)
    inputs, targets = {"first": x[:, :2], "second": x[:, 2:]}, {"a": y, "b": -y}
    history = model.fit(inputs, targets, batch_size=5, epochs=2, shuffle=False, validation_split=0.3, verbose=0)
    return outcome(model, history, predicted=model.predict(inputs, batch_size=4, verbose=0))


@on_workers(2, stock=False)
def test_empty_data_is_refused(job):
    model = regressor(job)
    with pytest.raises(UsageError, match="empty"):
        model.fit(tf.data.Dataset.from_tensor_slices(regression(4)).batch(2).take(0), verbose=0)
    with pytest.raises(UsageError, match="at least one batch"):
        model.fit(iter(()), verbose=0)
