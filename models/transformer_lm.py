"""A decoder-only transformer language model: causal attention, pre-norm, learned or rotary positions."""

import keras

from models import blocks, checks


def build(
    *,
    vocab: int = 256,
    seq_len: int = 128,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    positions: str = "learned",
    tied: bool = False,
) -> keras.Model:
    """Builds the model.

    Args:
        vocab: Number of tokens.
        seq_len: Positions of an example.
        width: Channels; a multiple of heads.
        depth: Number of blocks.
        heads: Attention heads of a block.
        dropout: The rate after embedding, attention and perceptron; at 0 there is no dropout layer.
        positions: "learned", a vector for each, or "rotary", turned into the attention's queries and keys, for which
            width / heads has to be even.
        tied: Whether the output uses the table of the token embedding instead of its own.

    Returns:
        An uncompiled model from integer tokens (batch, seq_len) to float32 logits (batch, seq_len, vocab).

    Raises:
        UsageError: If an argument cannot be right.
    """
    checks.positive(vocab=vocab, seq_len=seq_len)
    blocks.check_sizes(width=width, depth=depth, heads=heads, dropout=dropout)
    checks.one_of(("learned", "rotary"), positions=positions)
    checks.one_of((True, False), tied=tied)
    rotary = positions == "rotary"
    if rotary:
        checks.divisible("width", width, "2 * heads", 2 * heads)
    layers = keras.layers
    normal = keras.initializers.RandomNormal(stddev=0.02)
    tokens = keras.Input((seq_len,), dtype="int32", name="tokens")
    if tied:
        embed = layers.ReversibleEmbedding(
            vocab, width, embeddings_initializer=normal, reverse_dtype="float32", name="embed"
        )
    else:
        embed = layers.Embedding(vocab, width, embeddings_initializer=normal, name="embed")
    x = embed(tokens)
    if not rotary:
        x = blocks.PositionEmbedding(name="positions")(x)
    if dropout:
        x = layers.Dropout(dropout, name="embed_dropout")(x)
    for index in range(depth):
        x = blocks.pre_norm_block(x, heads=heads, causal=True, rotary=rotary, dropout=dropout, name=f"block_{index}")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    if tied:
        logits = layers.Activation("linear", dtype="float32", name="logits")(embed(x, reverse=True))
    else:
        logits = layers.Dense(vocab, use_bias=False, dtype="float32", name="logits")(x)
    return keras.Model(tokens, logits, name="transformer_lm")
