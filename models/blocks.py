"""What the language model and the vision transformer share: positions, class token, the pre-norm block."""

from typing import Any

import keras

from models import checks
from models.rotary import RotaryAttention


@keras.saving.register_keras_serializable("tfdist_models")
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector for each position to a sequence of known length.

    The table is used whole in every step, so its gradient is dense: unlike that of an Embedding of the positions.
    """

    def build(self, input_shape: Any) -> None:
        """Makes the table; `input_shape` is (batch, positions, width)."""
        self.table = self.add_weight(
            shape=tuple(input_shape[1:]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="table",
        )

    def call(self, inputs: Any) -> Any:
        """Returns `inputs` with the positions added."""
        return inputs + keras.ops.cast(self.table, inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape does not change."""
        return input_shape


@keras.saving.register_keras_serializable("tfdist_models")
class ClassToken(keras.layers.Layer):
    """Puts one learned vector before each sequence."""

    def build(self, input_shape: Any) -> None:
        """Makes the vector; `input_shape` is (batch, positions, width)."""
        self.token = self.add_weight(
            shape=(1, 1, input_shape[-1]), initializer=keras.initializers.RandomNormal(stddev=0.02), name="token"
        )

    def call(self, inputs: Any) -> Any:
        """Returns `inputs` with the vector before them."""
        token = keras.ops.cast(self.token, inputs.dtype)
        return keras.ops.concatenate([keras.ops.zeros_like(inputs[:, :1]) + token, inputs], axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """One position more."""
        batch, positions, width = input_shape
        return batch, positions + 1, width


def check_sizes(*, width: int, depth: int, heads: int, dropout: float) -> None:
    """Checks the arguments that both transformers have.

    Args:
        width: Channels.
        depth: Blocks.
        heads: Attention heads of a block.
        dropout: Rate.

    Raises:
        UsageError: If one cannot be right.
    """
    checks.positive(width=width, depth=depth, heads=heads)
    checks.divisible("width", width, "heads", heads)
    checks.rate(dropout=dropout)


def pre_norm_block(x: Any, *, heads: int, causal: bool, dropout: float, name: str, rotary: bool = False) -> Any:
    """Adds attention and a two-layer perceptron, each behind its own layer normalisation.

    Args:
        x: Symbolic tensor of shape (batch, positions, width).
        heads: Attention heads; has to divide the width.
        causal: Whether a position sees only itself and those before it.
        dropout: The rate after attention and perceptron; at 0 there is no dropout layer.
        name: Prefix of the layers' names.
        rotary: Whether attention knows the positions by itself, by rotation.

    Returns:
        A symbolic tensor of the same shape.
    """
    layers = keras.layers
    width = x.shape[-1]
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_attention_norm")(x)
    if rotary:
        y = RotaryAttention(heads, causal=causal, name=f"{name}_attention")(y)
    else:
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")
        y = attention(y, y, use_causal_mask=causal)
    if dropout:
        y = layers.Dropout(dropout, name=f"{name}_attention_dropout")(y)
    x = layers.Add(name=f"{name}_attention_add")([x, y])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_mlp_norm")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_mlp_in")(y)
    y = layers.Dense(width, name=f"{name}_mlp_out")(y)
    if dropout:
        y = layers.Dropout(dropout, name=f"{name}_mlp_dropout")(y)
    return layers.Add(name=f"{name}_mlp_add")([x, y])
