"""Every kind of data that Keras's methods take, and every way to walk through it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist


def _data(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def _dense(**options):
    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
        return model

    return build


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size):
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


def _generator(x, y, size, batches=None):
    for index in range(batches or -(-len(x) // size)):
        start = index * size % len(x)
        yield x[start : start + size], y[start : start + size]


KINDS = {
    "tf.data": lambda x, y: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(5)},
    "tf.data of unknown length": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(5).filter(lambda a, b: True)
    },
    "tf.data, repeated": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(5).repeat(),
        "steps_per_epoch": 4,
    },
    "PyDataset": lambda x, y: {"x": Batches(x, y, 5), "shuffle": False},
    "generator of exactly the steps": lambda x, y: {"x": _generator(x, y, 5, 6), "steps_per_epoch": 3},
    "arrays and more steps than batches": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 5,
        "steps_per_epoch": 4,
        "shuffle": False,
    },
    "arrays and fewer steps than batches": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 5,
        "steps_per_epoch": 2,
        "shuffle": False,
    },
    "validation_data": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 5,
        "shuffle": False,
        "validation_data": (x[:7], y[:7]),
        "validation_batch_size": 4,
    },
    "validation_data with weights": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 5,
        "shuffle": False,
        "validation_data": (x[:7], y[:7], np.linspace(0, 1, 7, dtype="float32")),
    },
    "validation_split": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 4,
        "shuffle": False,
        "validation_split": 0.3,
        "validation_freq": 2,
    },
    "validation from a dataset with steps": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 5,
        "shuffle": False,
        "validation_steps": 2,
        "validation_data": tf.data.Dataset.from_tensor_slices((x, y)).batch(3),
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_data(parity, kind):
    x, y = _data(13)
    parity.check(
        _dense(), lambda model: model.fit(**KINDS[kind](x, y), epochs=2, verbose=0), on=("one_device", "mirrored2")
    )


def test_a_generator_loses_no_batch_to_building(strategies):
    x, y = _data(12)
    taken = []

    def generator():
        for start in (0, 4, 8):
            taken.append(start)
            yield x[start : start + 4], y[start : start + 4]

    with strategies["mirrored2"].scope():
        model = keras.Sequential([keras.layers.Dense(2)])  # built from the first batch
        model.compile("sgd", "mse")
    tfdist.prepare(model)
    model.fit(generator(), steps_per_epoch=3, epochs=1, verbose=0)
    assert taken == [0, 4, 8]
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 3


def test_nested_inputs_and_outputs(parity):
    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        joined = keras.layers.Concatenate()([a, b])
        outputs = [keras.layers.Dense(2, name="p")(joined), keras.layers.Dense(1, name="q")(joined)]
        model = keras.Model([a, b], outputs)
        model.compile(keras.optimizers.SGD(0.05), ["mse", "mae"], metrics=[["mae"], ["mse"]])
        return model

    x, y = _data(13)

    def train(model):
        history = model.fit([x, -x], [y, y[:, :1]], batch_size=5, epochs=2, shuffle=False, verbose=0).history
        model.reset_metrics()  # Keras 3.12 does not do so by itself
        batch = model.train_on_batch([x[:5], x[5:10]], [y[:5], y[5:10, :1]], return_dict=True)
        return history, batch, model.predict([x, -x], batch_size=5, verbose=0)

    parity.check(build, train, on=("one_device", "mirrored2"))


@pytest.mark.parametrize("steps_per_execution", [4, 16])
def test_steps_per_execution_with_ten_steps_an_epoch(parity, steps_per_execution):
    x, y = _data(40)

    def train(model):
        history = model.fit(
            x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(x[:21], y[:21])
        ).history
        return history, model.evaluate(x, y, batch_size=4, verbose=0)

    parity.check(_dense(steps_per_execution=steps_per_execution), train, on=("one_device", "mirrored2"))


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_compile_options(parity, options):
    x, y = _data(13)

    def train(model):
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(x, y, batch_size=5, verbose=0), model.predict(x, batch_size=5, verbose=0)

    parity.check(_dense(**options), train, on=("one_device", "mirrored2"))


class Counts(keras.metrics.Metric):
    """Counts examples in an int32 variable."""

    def __init__(self, name="counts"):
        super().__init__(name=name)
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign(self.seen + keras.ops.shape(y_true)[0])

    def result(self):
        return self.seen


METRICS = {
    "accuracy and counts": lambda: ["accuracy", Counts()],
    "auc": lambda: [keras.metrics.AUC(num_thresholds=20, multi_label=True, num_labels=3, name="auc")],
    "f1": lambda: [keras.metrics.F1Score(average="macro")],
    "confusion": lambda: [
        keras.metrics.Precision(name="p"),
        keras.metrics.Recall(name="r"),
        keras.metrics.TruePositives(name="tp"),
    ],
    "iou": lambda: [keras.metrics.OneHotMeanIoU(num_classes=3, name="iou")],
    "means": lambda: ["categorical_crossentropy", keras.metrics.CosineSimilarity(), keras.metrics.KLDivergence()],
    "top k": lambda: [keras.metrics.TopKCategoricalAccuracy(k=2)],
    "rmse": lambda: [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()],
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_count_each_example_once(parity, name):
    x, _ = _data(21)
    y = np.eye(3, dtype="float32")[np.arange(21) % 3]

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.compile(
            keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=METRICS[name](), weighted_metrics=["mse"]
        )
        return model

    def train(model):
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        weights = np.linspace(0, 2, 21, dtype="float32")
        return history, model.evaluate(x, y, sample_weight=weights, batch_size=4, verbose=0, return_dict=True)

    parity.check(build, train, on=("one_device", "mirrored2", "mirrored4"), atol=1e-5)


def test_evaluate_counts_twenty_one_examples(strategies):
    x, y = _data(21)
    for name in ("one_device", "mirrored2", "mirrored4"):
        with strategies[name].scope():
            model = _dense()()
            model.compile("sgd", "mse", metrics=[Counts()])
        results = tfdist.prepare(model).evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        assert results["counts"] == 21


def test_predict_gives_every_row_once_in_order(strategies):
    x = np.arange(100, dtype="float32")[:, None]
    for name in ("one_device", "mirrored2", "mirrored3", "mirrored4"):
        with strategies[name].scope():
            inputs = keras.Input((1,))
            model = keras.Model(inputs, {"same": keras.layers.Identity()(inputs), "twice": inputs * 2})
            model.compile("sgd", "mse")
        tfdist.prepare(model)
        for source in (x, tf.data.Dataset.from_tensor_slices(x).batch(8), _rows(x)):
            found = model.predict(source, batch_size=8 if source is x else None, verbose=0)
            np.testing.assert_array_equal(found["same"], x)
            np.testing.assert_array_equal(found["twice"], 2 * x)


def _rows(x):
    for start in range(0, len(x), 8):
        yield (x[start : start + 8],)


def test_single_batches(parity):
    x, y = _data(7)

    def train(model):
        results = [model.train_on_batch(x, y, sample_weight=np.arange(7, dtype="float32"))]
        for run, rows in ((model.train_on_batch, 3), (model.test_on_batch, 7)):
            model.reset_metrics()  # Keras 3.12 does not do so by itself
            results.append(run(x[:rows], y[:rows], return_dict=True))
        return [*results, model.predict_on_batch(x)]

    parity.check(_dense(), train)


def test_shuffled_epochs_differ_and_repeat_with_the_seed(strategies):
    x = np.arange(12, dtype="float32")[:, None]
    orders = []
    for name in ("one_device", "mirrored2", "mirrored4"):
        seen = []

        def show(y_true, y_pred, seen=seen):
            return keras.ops.sum(y_pred * 0, axis=-1)

        with strategies[name].scope():
            keras.utils.set_random_seed(5)
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        tfdist.prepare(model)
        history = [model.fit(x, x**2 / 50, batch_size=4, epochs=3, verbose=0).history["loss"] for _ in range(2)]
        orders.append(history)
    np.testing.assert_allclose(orders[1], orders[0], rtol=1e-4)
    np.testing.assert_allclose(orders[2], orders[0], rtol=1e-4)
