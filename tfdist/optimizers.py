"""Names -> Keras optimizers, and the warmup of the learning rate."""

from collections.abc import Callable
from typing import Any

import keras

from tfdist.config import OptimizerConfig

_MAKERS: dict[str, tuple[Callable[..., keras.optimizers.Optimizer], dict[str, Any]]] = {
    "sgd": (keras.optimizers.SGD, {}),
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9}),
    "nesterov": (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (keras.optimizers.Adam, {}),
    "adamw": (keras.optimizers.AdamW, {}),
    "adamax": (keras.optimizers.Adamax, {}),
    "nadam": (keras.optimizers.Nadam, {}),
    "rmsprop": (keras.optimizers.RMSprop, {}),
    "adagrad": (keras.optimizers.Adagrad, {}),
    "adadelta": (keras.optimizers.Adadelta, {}),
    "adafactor": (keras.optimizers.Adafactor, {}),
    "ftrl": (keras.optimizers.Ftrl, {}),
    "lamb": (keras.optimizers.Lamb, {}),
    "lion": (keras.optimizers.Lion, {}),
}


@keras.saving.register_keras_serializable("tfdist")
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises in a straight line, then stays.

    Update number n, counted from 1, uses `learning_rate * min(1, n / warmup_steps)`.

    Args:
        learning_rate: What it rises to.
        warmup_steps: At which update it gets there, from 1.
    """

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate after `step` updates."""
        done = keras.ops.cast(step, "float32") + 1.0
        return self.learning_rate * keras.ops.minimum(1.0, done / float(self.warmup_steps))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"learning_rate": self.learning_rate, "warmup_steps": self.warmup_steps}


def make_optimizer(wanted: OptimizerConfig) -> keras.optimizers.Optimizer:
    """Returns a new optimizer. Call it under the strategy's scope.

    Args:
        wanted: Name, learning rate and warmup.
    """
    maker, arguments = _MAKERS[wanted.name]
    rate: Any = wanted.learning_rate
    if wanted.warmup_steps:
        if rate is None:
            rate = float(maker(**arguments).learning_rate)
        rate = Warmup(rate, wanted.warmup_steps)
    return maker(**arguments) if rate is None else maker(learning_rate=rate, **arguments)
