"""A multilayer perceptron: flattens its input, then dense layers with ReLU."""

from collections.abc import Sequence

import keras

from models import checks


def build(
    *,
    image_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    width: int = 512,
    depth: int = 1,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model.

    Args:
        image_shape: The shape of one example, of any rank: (784,) is as good as (28, 28, 1).
        classes: How many logits come out.
        width: Units of each hidden layer.
        depth: How many hidden layers.
        dropout: The rate after each hidden layer; at 0 there is no dropout layer.

    Returns:
        An uncompiled model from examples to float32 logits.

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.each_positive(image_shape=image_shape)
    checks.positive(classes=classes, width=width, depth=depth)
    checks.rate(dropout=dropout)
    inputs = keras.Input(tuple(image_shape), name="image")
    x = keras.layers.Flatten(name="flatten")(inputs) if len(image_shape) > 1 else inputs
    for index in range(depth):
        x = keras.layers.Dense(width, activation="relu", name=f"hidden_{index}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout_{index}")(x)
    logits = keras.layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")
