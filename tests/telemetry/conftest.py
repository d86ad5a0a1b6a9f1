"""A small training that tests of telemetry watch."""

import keras
import numpy as np
import pytest

import tfdist


@pytest.fixture
def build(strategies):
    """Returns a function that makes a prepared model under a strategy."""

    def make(name="one_device", seed=3, *, hook=None, spe=1, width=8, model=None):
        with strategies[name].scope():
            keras.utils.set_random_seed(seed)
            made = (
                model()
                if model
                else keras.Sequential([keras.Input((6,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(2)])
            )
            made.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=spe)
        return tfdist.prepare(made, hook=hook)

    return make


@pytest.fixture
def arrays():
    rng = np.random.default_rng(4)
    return rng.normal(size=(40, 6)).astype("float32"), rng.normal(size=(40, 2)).astype("float32")
