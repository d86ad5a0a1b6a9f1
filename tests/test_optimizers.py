"""The optimizers by name, and the warmup."""

import pytest

from tfdist import config


@pytest.mark.parametrize("name", config.OPTIMIZERS)
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_every_name_makes_an_optimizer_that_steps_and_saves(name, warmup_steps, cpu_devices):
    import keras
    import numpy as np

    from tfdist.optimizers import make_optimizer

    optimizer = make_optimizer(config.OptimizerConfig(name, 0.5, warmup_steps))
    variable = keras.Variable(np.ones((2, 2)), dtype="float32")
    optimizer.build([variable])
    first = 0.5 / 4 if warmup_steps else 0.5
    assert float(optimizer.learning_rate) == pytest.approx(first)
    optimizer.apply([np.ones((2, 2), "float32")])
    assert (np.asarray(variable) < 1).all()
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(again) is type(optimizer) and float(again.learning_rate) == pytest.approx(first)


def test_names_are_those_of_the_flags(cpu_devices):
    from tfdist import optimizers

    assert tuple(optimizers._MAKERS) == config.OPTIMIZERS


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_learning_rate_of_the_optimizer_itself(warmup_steps, cpu_devices):
    from tfdist.optimizers import make_optimizer

    optimizer = make_optimizer(config.OptimizerConfig("sgd", None, warmup_steps))
    assert float(optimizer.learning_rate) == pytest.approx(0.01 / max(warmup_steps, 1))


def test_warmup_rises_then_stays(cpu_devices):
    from tfdist.optimizers import Warmup

    rate = Warmup(2.0, 4)
    assert [float(rate(step)) for step in range(7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert float(rate(10**9)) == 2.0
    assert Warmup.from_config(rate.get_config())(1) == 1.0


def test_momentum_names(cpu_devices):
    from tfdist.optimizers import make_optimizer

    found = {name: make_optimizer(config.OptimizerConfig(name)) for name in ("sgd", "momentum", "nesterov")}
    assert {name: (made.momentum, made.nesterov) for name, made in found.items()} == {
        "sgd": (0.0, False),
        "momentum": (0.9, False),
        "nesterov": (0.9, True),
    }
