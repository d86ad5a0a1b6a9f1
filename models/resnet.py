"""Residual networks: ResNet-18 written out for small and large images, ResNet-50 of keras.applications."""

from collections.abc import Sequence
from typing import Any

import keras

from models import checks

_BLOCKS = (2, 2, 2, 2)
_RESNET50_SMALLEST = 32


def build_18(
    *,
    image_shape: Sequence[int] = (32, 32, 3),
    classes: int = 10,
    width: int = 64,
    synchronized: bool = False,
) -> keras.Model:
    """Builds a ResNet-18 (He et al. 2015).

    Images below 64x64 get the stem that is usual for CIFAR (3x3, stride 1, no pooling), larger ones that of
    ImageNet (7x7, stride 2, pooling).

    Args:
        image_shape: (height, width, channels).
        classes: How many logits come out.
        width: Channels of the first stage; each later stage has twice as many.
        synchronized: Whether batch normalisation takes its statistics over all replicas.

    Returns:
        An uncompiled model from images to float32 logits.

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.image(image_shape)
    checks.positive(classes=classes, width=width)
    checks.one_of((True, False), synchronized=synchronized)
    layers = keras.layers
    inputs = keras.Input(tuple(image_shape), name="image")
    if min(image_shape[:2]) < 64:
        x = _conv_bn(inputs, width, 3, 1, synchronized, "stem")
        x = layers.ReLU(name="stem_relu")(x)
    else:
        x = _conv_bn(inputs, width, 7, 2, synchronized, "stem")
        x = layers.ReLU(name="stem_relu")(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for stage, blocks in enumerate(_BLOCKS):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _basic_block(x, width * 2**stage, stride, synchronized, f"stage_{stage}_block_{block}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="resnet18")


def build_50(*, image_shape: Sequence[int] = (224, 224, 3), classes: int = 1000) -> keras.Model:
    """Builds the ResNet-50 of keras.applications with random weights.

    Args:
        image_shape: (height, width, channels), at least 32x32.
        classes: How many logits come out.

    Returns:
        An uncompiled model from images to float32 logits.

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.image(image_shape, smallest=_RESNET50_SMALLEST)
    checks.positive(classes=classes)
    trunk = keras.applications.ResNet50(include_top=False, weights=None, input_shape=tuple(image_shape), pooling="avg")
    logits = keras.layers.Dense(classes, dtype="float32", name="logits")(trunk.output)
    return keras.Model(trunk.input, logits, name="resnet50")


def _basic_block(x: Any, channels: int, stride: int, synchronized: bool, name: str) -> Any:
    layers = keras.layers
    shortcut = x
    if stride != 1 or x.shape[-1] != channels:
        shortcut = _conv_bn(x, channels, 1, stride, synchronized, f"{name}_shortcut")
    y = _conv_bn(x, channels, 3, stride, synchronized, f"{name}_a")
    y = layers.ReLU(name=f"{name}_a_relu")(y)
    y = _conv_bn(y, channels, 3, 1, synchronized, f"{name}_b")
    y = layers.Add(name=f"{name}_add")([y, shortcut])
    return layers.ReLU(name=f"{name}_relu")(y)


def _conv_bn(x: Any, channels: int, kernel: int, stride: int, synchronized: bool, name: str) -> Any:
    x = keras.layers.Conv2D(
        channels,
        kernel,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, synchronized=synchronized, name=f"{name}_bn")(x)
