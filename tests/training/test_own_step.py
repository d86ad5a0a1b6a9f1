"""Models with a train_step of their own: what they do by themselves gives the numbers of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf


def _data(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def _fit(x, y, batch, epochs=2):
    return lambda model: model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)


class TwoOptimizers(keras.Model):
    """A model with its own step: two losses, two optimizers, and sums of examples as logs."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, activation="tanh")
        self.second = keras.layers.Dense(2)
        self.other = keras.optimizers.Adam(0.01, clipnorm=0.05)

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build((None, 4))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_sum(tf.square(self(x) - y), axis=-1)
            loss = tf.reduce_sum(losses)
        self.optimizer.apply(tape.gradient(loss, self.first.trainable_variables), self.first.trainable_variables)
        self.other.apply(tape.gradient(loss, self.second.trainable_variables), self.second.trainable_variables)
        return {"total": loss, "examples": tf.cast(tf.shape(x)[0], tf.float32)}


def test_own_train_step_with_two_optimizers_and_sums_as_logs(parity):
    def build():
        model = TwoOptimizers()
        model.compile(keras.optimizers.SGD(0.01))
        model.distribute_reduction_method = "sum"
        model.build((None, 6))
        model.other.build(model.second.trainable_variables)
        model.optimizer.build(model.first.trainable_variables)
        return model

    parity.check(build, _fit(*_data(12), 4), on=("one_device", "mirrored2"))


class FromTheGuide(keras.Sequential):
    """The train_step of Keras's own guide, line by line."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


def _from_the_guide():
    model = FromTheGuide([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("rows", [12, 13])
def test_the_train_step_of_the_guide(parity, rows):
    parity.check(_from_the_guide, _fit(*_data(rows), 4))


def test_a_train_step_that_calls_keras_own(parity):
    class Model(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "twice": 2 * logs["loss"]}

    def build():
        model = Model([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    def train(model):
        history = _fit(*_data(13), 5)(model).history
        return {name: history[name] for name in ("loss", "mae")}

    parity.check(build, train, on=("one_device", "mirrored2", "mirrored4"))


around = keras.losses.MeanAbsoluteError()


class Gan(keras.Model):
    """Two networks, two optimizers, one loss object as an attribute and one from around, trackers of their own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.d_loss = keras.metrics.Mean(name="d_loss")

    @property
    def metrics(self):
        return [self.g_loss, self.d_loss]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, data):
        real, latent = data
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(tf.ones((tf.shape(real)[0], 1)), self.discriminator(real))
            d_loss += self.loss_fn(tf.zeros((tf.shape(real)[0], 1)), self.discriminator(self.generator(latent)))
        weights = self.discriminator.trainable_variables
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            fake = self.generator(latent)
            g_loss = self.loss_fn(tf.ones((tf.shape(real)[0], 1)), self.discriminator(fake)) + around(real, fake)
        weights = self.generator.trainable_variables
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.g_loss.update_state(g_loss)
        self.d_loss.update_state(d_loss)
        return {"g_loss": self.g_loss.result(), "d_loss": self.d_loss.result()}


@pytest.mark.parametrize("rows", [12, 13])
def test_gan(parity, rows):
    def build():
        model = Gan()
        model.compile(
            keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), keras.losses.BinaryCrossentropy(from_logits=True)
        )
        return model

    parity.check(build, _fit(*_data(rows), 4), on=("one_device", "mirrored2", "mirrored4"))
