"""A vision transformer: patches, learned positions, pre-norm blocks, a mean or a class token."""

from collections.abc import Sequence

import keras

from models import blocks, checks


def build(
    *,
    image_shape: Sequence[int] = (32, 32, 3),
    classes: int = 10,
    patch: int = 4,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    pool: str = "mean",
) -> keras.Model:
    """Builds the model.

    Args:
        image_shape: (height, width, channels); height and width are multiples of patch.
        classes: How many logits come out.
        patch: Height and width of a patch.
        width: Channels; a multiple of heads.
        depth: Number of blocks.
        heads: Attention heads of a block.
        dropout: The rate after embedding, attention and perceptron; at 0 there is no dropout layer.
        pool: What the logits are taken from: "mean" over the patches, or "token", a class token put before them.

    Returns:
        An uncompiled model from images to float32 logits.

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.positive(classes=classes, patch=patch)
    checks.image(image_shape, multiple=patch)
    blocks.check_sizes(width=width, depth=depth, heads=heads, dropout=dropout)
    checks.one_of(("mean", "token"), pool=pool)
    layers = keras.layers
    inputs = keras.Input(tuple(image_shape), name="image")
    x = layers.Conv2D(width, patch, strides=patch, name="patches")(inputs)
    x = layers.Reshape((-1, width), name="sequence")(x)
    if pool == "token":
        x = blocks.ClassToken(name="class_token")(x)
    x = blocks.PositionEmbedding(name="positions")(x)
    if dropout:
        x = layers.Dropout(dropout, name="embed_dropout")(x)
    for index in range(depth):
        x = blocks.pre_norm_block(x, heads=heads, causal=False, dropout=dropout, name=f"block_{index}")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    x = x[:, 0] if pool == "token" else layers.GlobalAveragePooling1D(name="pool")(x)
    logits = layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="vit")
