"""Lossy hooks learn real data as well as the exact sum does, after the same steps."""

import keras
import numpy as np
import pytest

import models
import tfdist

SEEDS = (1, 2, 3)
EPOCHS = 10


def accuracy(strategy, hook, seed):
    """Trains the digits CNN on two replicas; returns the accuracy on the test images."""
    digits = tfdist.data.load("digits", batch_size=64, seed=seed)
    with strategy.scope():
        keras.utils.set_random_seed(seed)
        model = models.build(models.find("digits_cnn"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    tfdist.prepare(model, hook=hook)
    model.fit(digits.train, epochs=EPOCHS, verbose=0)
    return model.evaluate(digits.test, verbose=0)[1]


@pytest.fixture(scope="module")
def exact(strategies):
    return np.mean([accuracy(strategies["mirrored2"], None, seed) for seed in SEEDS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["bf16", "fp16", "int8", "topk:ratio=0.05", "powersgd:rank=4,start_step=46", "local_sgd:period=4"], ids=str
)
def test_digits_within_half_a_point_of_exact(strategies, exact, hook):
    found = np.mean([accuracy(strategies["mirrored2"], hook, seed) for seed in SEEDS])
    print(f"digits_cnn, {EPOCHS} epochs, mean of {len(SEEDS)} seeds: exact {exact:.4f}, {hook} {found:.4f}")
    assert found >= exact - 0.005
