"""Self-attention with rotary positions (Su et al. 2021)."""

from typing import Any

import keras
from keras import ops

_BASE = 10_000.0


@keras.saving.register_keras_serializable("tfdist_models")
class RotaryAttention(keras.layers.Layer):
    """Self-attention whose queries and keys are rotated by their position, so that scores depend on distances.

    Args:
        heads: Attention heads; twice that has to divide the width.
        causal: Whether a position sees only itself and those before it.
        **options: Those of every layer.
    """

    def __init__(self, heads: int, *, causal: bool, **options: Any) -> None:
        super().__init__(**options)
        self.heads = heads
        self.causal = causal

    def build(self, input_shape: Any) -> None:
        """Makes the weights; `input_shape` is (batch, positions, width)."""
        width = input_shape[-1]
        self.inward = keras.layers.Dense(3 * width, name="in", dtype=self.dtype_policy)
        self.outward = keras.layers.Dense(width, name="out", dtype=self.dtype_policy)
        self.inward.build(input_shape)
        self.outward.build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Returns what each position gathered."""
        _, positions, width = inputs.shape
        parts = ops.reshape(self.inward(inputs), (-1, positions, 3, self.heads, width // self.heads))
        query, key, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        gathered = ops.dot_product_attention(_rotate(query), _rotate(key), value, is_causal=self.causal)
        return self.outward(ops.reshape(gathered, (-1, positions, width)))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape does not change."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "heads": self.heads, "causal": self.causal}


def _rotate(x: Any) -> Any:
    """Rotates pairs of channels of (batch, positions, heads, channels); in float32, where angles are exact."""
    _, positions, _, channels = x.shape
    half = channels // 2
    rates = _BASE ** (-ops.arange(half, dtype="float32") / half)
    angles = ops.arange(positions, dtype="float32")[:, None] * rates[None, :]
    sin, cos = ops.sin(angles)[None, :, None, :], ops.cos(angles)[None, :, None, :]
    first, second = ops.split(ops.cast(x, "float32"), 2, axis=-1)
    rotated = ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return ops.cast(rotated, x.dtype)
