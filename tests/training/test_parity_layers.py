"""Layers whose numbers depend on how a batch is cut: batch normalization, dropout, sparse, ragged and string inputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist


def _data(rows, seed=0):
    rng = np.random.default_rng(seed)
    return (5 + 2 * rng.normal(size=(rows, 6))).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def _fit(x, y, batch, epochs=2):
    return lambda model: model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)


def _normalized(synchronized):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.8),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return build


@pytest.mark.parametrize(("rows", "batch"), [(13, 5), (10, 4)], ids=["uneven", "empty replicas"])
def test_synchronized_batch_norm(parity, rows, batch):
    x, y = _data(rows)

    def train(model):
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(x, y, batch_size=4, verbose=0), model.predict(x, verbose=0)

    parity.check(_normalized(True), train, atol=1e-5)


def test_batch_norm_alone_keeps_the_mean_of_the_replicas_statistics(strategies):
    x, y = _data(10)
    with strategies["mirrored4"].scope():
        model = _normalized(False)()
    tfdist.prepare(model)
    dense, norm = model.layers[0], model.layers[1]
    kernel = dense.get_weights()[0]
    model.fit(x[:4], y[:4], batch_size=4, shuffle=False, verbose=0)
    each = x[:4] @ kernel  # one example a replica: its own mean, no variance
    np.testing.assert_allclose(norm.get_weights()[2], 0.2 * each.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(norm.get_weights()[3], np.full(4, 0.8), rtol=1e-4)
    before = norm.get_weights()
    kernel, bias = dense.get_weights()
    model.fit(x[8:], y[8:], batch_size=4, shuffle=False, verbose=0)  # two replicas get nothing
    each = x[8:] @ kernel + bias
    np.testing.assert_allclose(norm.get_weights()[2], 0.8 * before[2] + 0.2 * each.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(norm.get_weights()[3], 0.8 * before[3], rtol=1e-4)


def test_batch_norm_next_to_a_masked_loss(strategies):
    """The replicas stop at the loss's exchange while one of them is being traced."""
    tokens = np.tile(np.array([[1, 2, 3, 0], [4, 0, 0, 0]], "int32"), (4, 1))
    with strategies["mirrored2"].scope():
        inputs = keras.Input((4,), dtype="int32")
        states = keras.layers.BatchNormalization()(keras.layers.Embedding(5, 3, mask_zero=True)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(5)(states))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tfdist.prepare(model)
    model.fit(tokens, tokens, batch_size=8, verbose=0)
    for variable in model.layers[2].weights:
        first, second = strategies["mirrored2"].experimental_local_results(variable.value)
        np.testing.assert_array_equal(first.numpy(), second.numpy())


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_norm_saved_and_loaded(strategies, tmp_path, synchronized):
    x, y = _data(13)
    with strategies["mirrored2"].scope():
        model = _normalized(synchronized)()
    tfdist.prepare(model)
    model.fit(x, y, batch_size=5, verbose=0)
    expected = model.evaluate(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").evaluate(x, y, verbose=0) == pytest.approx(expected)
    with strategies["mirrored4"].scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert tfdist.prepare(again).evaluate(x, y, verbose=0) == pytest.approx(expected)


class Shows(keras.Model):
    """Keeps the output of its dropout of every step in a variable of each replica."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=7)
        self.scale = keras.layers.Dense(1, use_bias=False)
        self.shown = tf.Variable(
            tf.zeros([64]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def call(self, x, training=False):
        masked = self.dropout(x, training=training)
        if training:
            self.shown.assign(tf.reshape(masked, [64]))
        return self.scale(masked)


def _masks(strategy, epochs=1):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = Shows()
        model.compile("sgd", "mse")
    tfdist.prepare(model)
    model.fit(np.ones((4, 32), "float32"), np.ones((4, 1), "float32"), batch_size=4, epochs=epochs, verbose=0)
    return [part.numpy() for part in strategy.experimental_local_results(model.shown)]


def test_dropout_masks_differ_between_replicas_and_steps_and_repeat_with_the_seed(strategies):
    first, second = _masks(strategies["mirrored2"])
    for mask in (first, second):
        assert set(np.unique(mask)) == {0.0, 2.0}
    assert (first != second).any()
    again = _masks(strategies["mirrored2"])
    np.testing.assert_array_equal(again, [first, second])
    later = _masks(strategies["mirrored2"], epochs=2)
    assert (later[0] != first).any() and (later[1] != second).any()


def test_string_and_float_inputs_with_a_lookup_inside(parity):
    words = np.array([["a"], ["b"], ["c"], ["unknown"], ["a"], ["b"], ["a"]] * 2)[:13]
    x, y = _data(13)

    def build():
        text = keras.Input((1,), dtype="string", name="text")
        numbers = keras.Input((6,), name="numbers")
        ids = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(text)
        joined = keras.layers.Concatenate()(
            [keras.layers.Flatten()(keras.layers.Embedding(4, 3)(ids)), keras.layers.Dense(3)(numbers)]
        )
        model = keras.Model({"text": text, "numbers": numbers}, keras.layers.Dense(2)(joined))
        model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        return model

    def train(model):
        inputs = {"text": tf.constant(words), "numbers": x}
        dataset = tf.data.Dataset.from_tensor_slices((inputs, y)).batch(5)
        history = model.fit(dataset, epochs=2, verbose=0).history
        return history, model.evaluate(dataset, verbose=0), model.predict(inputs, batch_size=5, verbose=0)

    parity.check(build, train)


def test_ragged_inputs(parity):
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 20, size=rng.integers(1, 9)).tolist() for _ in range(13)]
    y = rng.normal(size=(13, 1)).astype("float32")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(20, 4)
            self.head = keras.layers.Dense(1)

        def build(self, shape):
            self.table.build((None, None))
            self.head.build((None, 4))
            self.built = True

        def call(self, x):
            dense = x.to_tensor() if isinstance(x, tf.RaggedTensor) else x
            present = tf.cast(dense != 0, tf.float32)[..., None]
            return self.head(tf.reduce_sum(self.table(dense) * present, axis=1))

    def build():
        model = Model()
        model.build(None)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    def train(model):
        dataset = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(rows, dtype=tf.int32), y)).batch(5)
        return model.fit(dataset, epochs=2, verbose=0).history

    parity.check(build, train, on=("one_device", "mirrored2", "mirrored4"))


def test_sparse_inputs(parity):
    rng = np.random.default_rng(0)
    dense = (rng.normal(size=(13, 6)) * (rng.random((13, 6)) < 0.4)).astype("float32")
    y = rng.normal(size=(13, 2)).astype("float32")

    def build():
        inputs = keras.Input((6,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    def train(model):
        dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), y)).batch(5)
        return model.fit(dataset, epochs=2, verbose=0).history

    parity.check(build, train, on=("one_device", "mirrored2", "mirrored4"))
