"""A small convolutional network for small images, such as scikit-learn's 8x8 digits."""

from collections.abc import Sequence

import keras

from models import checks


def build(
    *,
    image_shape: Sequence[int] = (8, 8, 1),
    classes: int = 10,
    width: int = 32,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model.

    Args:
        image_shape: (height, width, channels), at least 2x2.
        classes: How many logits come out.
        width: Channels of the first convolution; the second has twice, the dense layer four times as many.
        dropout: The rate before the last layer; at 0 there is no dropout layer.

    Returns:
        An uncompiled model from images to float32 logits.

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.image(image_shape, smallest=2)
    checks.positive(classes=classes, width=width)
    checks.rate(dropout=dropout)
    layers = keras.layers
    inputs = keras.Input(tuple(image_shape), name="image")
    x = layers.Conv2D(width, 3, padding="same", activation="relu", name="conv_0")(inputs)
    x = layers.Conv2D(2 * width, 3, padding="same", activation="relu", name="conv_1")(x)
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(4 * width, activation="relu", name="hidden")(x)
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    logits = layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="digits_cnn")
