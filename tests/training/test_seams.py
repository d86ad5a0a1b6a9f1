"""What `tfdist.training.seams` relies on in Keras: a release that changes one of these fails here first."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.training import seams


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


def compiled(loss="mse", optimizer="sgd", **options):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    model.compile(optimizer, loss, **options)
    return model


class OwnSteps(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.side = keras.optimizers.SGD()
        self.pair = {"loss": keras.losses.MeanSquaredError()}

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        return {"loss": _GLOBAL_LOSS(data[1], self(data[0]))}

    def test_step(self, data):
        return {}

    def predict_step(self, data):
        return self(data[0])


_GLOBAL_LOSS = keras.losses.MeanAbsoluteError()


# Objects


def test_replaced_attributes_are_put_back_past_attribute_tracking():
    model = compiled()
    stock = model.compute_loss
    with seams.replaced(model, compute_loss=3, fresh=[1]):
        assert model.compute_loss == 3 and model.fresh == [1] and type(model.fresh) is list
    assert model.compute_loss == stock and not hasattr(model, "fresh")
    assert "compute_loss" not in vars(model)


def test_variables_are_made_and_nothing_changes_without_effect():
    layer = keras.layers.BatchNormalization()
    metric = keras.metrics.Mean()
    with seams.without_effect():
        layer(tf.ones([4, 2]), training=True)
        metric.update_state([1.0, 2.0])
    assert [v.shape for v in layer.variables] == [(2,)] * 4
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(2))
    assert float(metric.result()) == 0


def test_nested_layers_are_found():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    outer = keras.Sequential([inner, keras.layers.Activation("relu")])
    assert {type(layer).__name__ for layer in seams.layers(outer)} == {
        "Sequential",
        "Dense",
        "Activation",
        "InputLayer",
    }


def test_own_steps_are_told_from_kerass():
    own, stock = OwnSteps(), compiled()
    for asks in (seams.has_own_train_step, seams.has_own_test_step, seams.has_own_predict_step):
        assert asks(own) and not asks(stock)


def test_optimizers_and_losses_within_reach_of_own_steps():
    model = OwnSteps()
    model.compile("adam", "mse")
    assert [type(o).__name__ for o in seams.optimizers_of(model)] == ["Adam", "SGD"]
    assert {type(loss).__name__ for loss in seams.losses_of(model)} >= {"MeanSquaredError", "MeanAbsoluteError"}


def test_inner_optimizers_are_found():
    inner = keras.optimizers.Adam()
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    assert seams.with_inner_optimizers(scaled) == [scaled, inner]
    assert seams.with_inner_optimizers(inner) == [inner]


# The forward pass and the loss


def test_compute_loss_also_of_models_without_the_training_argument():
    class Old(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return tf.constant(7.0)

    arguments = (tf.ones([2, 3]), tf.ones([2, 2]), tf.zeros([2, 2]), None, True)
    assert float(seams.compute_loss(Old(), *arguments)) == 7
    assert float(seams.compute_loss(compiled(), *arguments)) == 1


def test_models_whose_call_takes_no_training():
    model = OwnSteps()
    assert seams.call_model(model, tf.ones([2, 3]), True).shape == (2, 1)
    dropping, x = compiled(), tf.random.stateless_normal([200, 3], [1, 2])
    for training, least, most in ((True, 100, 300), (False, 0, 0)):  # dropout leaves out half of 400 values
        zeros = 400 - int(tf.math.count_nonzero(seams.call_model(dropping, x, training)))
        assert least <= zeros <= most


def test_the_loss_and_its_slots():
    x = keras.Input((3,))
    model = keras.Model(x, {"a": keras.layers.Dense(1)(x), "b": keras.layers.Dense(1)(x)})
    model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 2.0, "b": 3.0})
    assert isinstance(seams.loss_tracker(model), keras.metrics.Mean)
    assert seams.loss_slots(model) is None and not seams.compiled_parts_built(model)
    built = []
    ones = {"a": tf.ones([2, 1]), "b": tf.ones([2, 1])}
    with seams.when_loss_is_built(model, lambda: built.append(seams.loss_slots(model))):
        loss = seams.compute_loss(model, None, ones, {"a": ones["a"] * 3, "b": ones["b"] * 3}, None, True)
    assert float(loss) == 2 * 4 + 3 * 2
    assert len(built) == 1 and len(built[0]) == 2
    assert all(callable(slot.loss) for slot in built[0])
    assert [seams.loss_weight(model, i) for i in range(2)] == [2.0, 3.0]
    assert [metric.name for metric in seams.output_loss_metrics(model)] == ["a_loss", "b_loss"]
    assert compiled(None).loss is None and seams.loss_slots(compiled(None)) is None


def test_slots_can_be_replaced_and_are_what_the_compiled_loss_calls():
    model = compiled()
    seams.compute_loss(model, None, tf.ones([2, 2]), tf.zeros([2, 2]), None, True)
    slots = seams.loss_slots(model)
    slots[0] = slots[0]._replace(loss=lambda y, p, w: tf.constant(9.0))
    assert float(seams.compute_loss(model, None, tf.ones([2, 2]), tf.zeros([2, 2]), None, True)) == 9


def test_standard_losses_are_told_from_those_that_reduce_themselves():
    class Own(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return tf.constant(1.0)

    assert seams.loss_is_reducible(keras.losses.Huber())
    assert not seams.loss_is_reducible(Own()) and not seams.loss_is_reducible(lambda y, p: 0.0)


def test_additional_losses_are_not_divided_by_the_replicas(strategies):
    strategy = strategies["mirrored2"]
    with strategy.scope():
        model = compiled()
    terms = strategy.run(lambda: seams.additional_loss(model, tf.constant([6.0])))
    assert [float(v) for v in strategy.experimental_local_results(terms)] == [6.0, 6.0]


def test_keras_divides_losses_by_the_replicas(strategies):
    """What has to be undone, or else the same loss would be smaller on more replicas."""
    strategy = strategies["mirrored2"]
    with strategy.scope():
        loss = keras.losses.MeanSquaredError()
    values = strategy.run(tf.function(lambda: loss(tf.ones([2, 2]), tf.zeros([2, 2]))))
    assert [float(v) for v in strategy.experimental_local_results(values)] == [0.5, 0.5]


def test_calls_of_a_loss_object_run_what_is_given():
    loss = keras.losses.MeanSquaredError()
    with seams.called_as(loss, lambda y, p, sample_weight=None: (y, p)):
        assert loss(1, 2) == (1, 2)
        assert isinstance(loss, keras.losses.MeanSquaredError)
    assert type(loss) is keras.losses.MeanSquaredError
    assert float(loss([[1.0]], [[0.0]])) == 1


def test_who_calls_is_keras_or_a_model():
    seen = []

    class Asks(keras.metrics.Mean):
        def update_state(self, *args, **options):
            seen.append(seams.called_by_keras())
            return super().update_state(*args, **options)

    metric = Asks()
    metric.update_state(1.0)
    model = compiled()
    object.__setattr__(model, "_loss_tracker", metric)
    model.run_eagerly = True
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 2)))
    assert seen[0] is False and seen[1:] and all(seen[1:])


def test_masks_travel_with_tensors():
    tensor = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    np.testing.assert_array_equal(seams.get_mask(tensor), [[True, False]])
    other = tf.ones([1, 2])
    assert seams.get_mask(other) is None
    seams.set_mask(other, tf.constant([[True, True]]))
    seams.set_mask(other, None)
    np.testing.assert_array_equal(seams.get_mask(other), [[True, True]])


# Variables


def test_variables_that_layers_update_themselves():
    model = compiled()
    assert [v.path.rpartition("/")[2] for v in seams.non_trainable_variables(model)] == [
        "moving_mean",
        "moving_variance",
    ]
    model.layers[1].trainable = False
    assert seams.non_trainable_variables(model) == []


def test_seed_generators():
    model = compiled()
    found = seams.seed_generators(model)
    assert model.layers[-1].seed_generator in found and len(found) == 2
    assert all(generator.state.shape == (2,) for generator in found)


def test_batch_norms_and_their_axes():
    model = keras.Sequential(
        [
            keras.Input((4, 5, 3)),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.BatchNormalization(),
        ]
    )
    found = seams.synchronized_batch_norms(model)
    assert found == [model.layers[0]] and list(seams.batch_norm_axes(found[0])) == [0, 1, 2]
    assert list(inspect.signature(found[0]._moments).parameters) == ["inputs", "mask"]


# Optimizers

OPTIMIZERS = [
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Lamb,
    keras.optimizers.Ftrl,
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_local_updates_equal_kerass_own(kind):
    """The base class's arithmetic on plain assignments gives what the TensorFlow class gives."""

    def trained(local):
        optimizer = kind(0.1, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.01)
        variable = keras.Variable(np.array([1.0, -2.0], "float32"))
        optimizer.build([variable])
        for step in range(5):
            gradient = tf.constant([step - 1.5, 0.3])
            if local:
                with seams.local_updates(optimizer):
                    optimizer.apply([gradient], [variable])
            else:
                optimizer.apply([gradient], [variable])
        assert type(optimizer) is kind
        return variable.numpy()

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)


def test_local_updates_run_within_a_condition(strategies):
    """Keras's own update enters `merge_call`, which `tf.cond` forbids; a local one only assigns."""
    strategy = strategies["mirrored2"]
    with strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def apply():
        optimizer.apply([tf.ones([2])], [variable])
        return 0

    def on_one_replica(_):
        tf.cond(tf.constant(True), apply, lambda: 0)

    def stock():
        strategy.run(lambda: tf.cond(tf.constant(True), apply, lambda: 0))

    def local():
        def update(strategy):
            strategy.extended.update(variable.value, on_one_replica, group=False)

        with seams.local_updates(optimizer):
            strategy.run(lambda: tf.distribute.get_replica_context().merge_call(update))

    with pytest.raises(RuntimeError, match="merge_call"):
        tf.function(stock, autograph=False)()
    tf.function(local, autograph=False)()
    for part in strategy.experimental_local_results(variable.value):
        np.testing.assert_array_equal(part, [-1.0, -1.0])


# Training


def test_metrics_that_examples_change():
    model = compiled(metrics=["mae"])
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 2)))
    names = {metric.name for metric in seams.default_metric_states(model)}
    assert names == {"compile_metrics"}
    assert seams.compiled_parts_built(model)


def test_logs_and_metrics():
    assert seams.logs_match_metrics({"loss": 1, "mae": 2}, {"mae": 0, "loss": 0})
    assert not seams.logs_match_metrics({"loss": 1}, {"mae": 0}) and not seams.logs_match_metrics(3, {})
    model = compiled(metrics=["mae"])
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 2)))
    assert seams.flatten_logs(model, {"mae": 2.0, "loss": 1.0}) == [1.0, 2.0]


def test_the_first_epoch_that_a_callback_asks_for(tmp_path):
    model = compiled()
    assert seams.initial_epoch(model) is None
    seams.set_initial_epoch(model, 3)
    assert seams.initial_epoch(model) == 3
    seams.set_initial_epoch(model, None)
    callback = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
    model.fit(np.ones((4, 3)), np.ones((4, 2)), epochs=2, verbose=0, callbacks=[callback])
    again = compiled()
    again.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    callback = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
    callback.set_model(again)
    callback.on_train_begin()
    assert seams.initial_epoch(again) == 2


def test_models_that_are_not_compiled_are_refused_as_by_keras():
    with pytest.raises(ValueError, match="must call `compile\\(\\)` before"):
        seams.assert_compiled(keras.Sequential([keras.layers.Dense(1)]), "fit")
    seams.assert_compiled(compiled(), "fit")


def test_the_key_changes_with_the_compilation_and_the_trainable_weights():
    model = compiled()
    first = seams.compiled_as(model)
    assert seams.compiled_as(model) == first
    model.layers[0].trainable = False
    frozen = seams.compiled_as(model)
    assert frozen != first
    model.compile("sgd", "mse")
    assert seams.compiled_as(model) != frozen
    eagerly = seams.predict_step_key(model)
    model.compile("sgd", "mse", run_eagerly=True)
    assert seams.predict_step_key(model) != eagerly


def test_outputs_of_batches_are_joined():
    joined = seams.joined_outputs([tf.ones([2, 3]), tf.zeros([1, 3])])
    assert joined.shape == (3, 3) and isinstance(joined, np.ndarray)
    ragged = seams.joined_outputs([tf.ones([2, 3]), tf.zeros([1, 4])])
    assert isinstance(ragged, tf.RaggedTensor) and ragged.shape[0] == 3
