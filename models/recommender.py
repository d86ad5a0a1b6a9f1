"""A recommender whose weights are nearly all embeddings, so that nearly all of its gradients are sparse."""

from collections.abc import Sequence

import keras

from models import checks
from tfdist.errors import UsageError


def build(
    *,
    categories: int = 8,
    dense: int = 4,
    vocab: int | Sequence[int] = 100_000,
    width: int = 16,
    hidden: int = 64,
    depth: int = 2,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model.

    Args:
        categories: How many categorical features an example has.
        dense: How many dense features an example has.
        vocab: Number of values of each categorical feature; one number stands for all features.
        width: Channels of each embedding.
        hidden: Units of each hidden layer.
        depth: How many hidden layers follow the embeddings.
        dropout: The rate after each hidden layer; at 0 there is no dropout layer.

    Returns:
        An uncompiled model from {"categories": int32 (batch, categories), "dense": float (batch, dense)} to one
        float32 logit (batch, 1).

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.positive(categories=categories, dense=dense, width=width, hidden=hidden, depth=depth)
    checks.rate(dropout=dropout)
    sizes = _vocabularies(vocab, categories)
    layers = keras.layers
    inputs = {
        "categories": keras.Input((categories,), dtype="int32", name="categories"),
        "dense": keras.Input((dense,), name="dense"),
    }
    parts = [layers.Dense(width, activation="relu", name="dense_in")(inputs["dense"])]
    for index, size in enumerate(sizes):
        embed = layers.Embedding(size, width, name=f"embed_{index}")
        parts.append(embed(inputs["categories"][:, index]))
    x = layers.Concatenate(name="join")(parts)
    for index in range(depth):
        x = layers.Dense(hidden, activation="relu", name=f"hidden_{index}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout_{index}")(x)
    logits = layers.Dense(1, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="recommender")


def _vocabularies(vocab: int | Sequence[int], categories: int) -> tuple[int, ...]:
    if not isinstance(vocab, (tuple, list)):
        checks.positive(vocab=vocab)
        return (vocab,) * categories
    checks.each_positive(vocab=vocab)
    if len(vocab) != categories:
        raise UsageError(f"vocab={tuple(vocab)!r} has to be one number or one for each of categories={categories}")
    return tuple(vocab)
