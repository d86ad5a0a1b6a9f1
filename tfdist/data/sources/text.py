"""Byte-level text: any file, or all files of a folder, as windows of bytes and the bytes that follow."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.source import ExampleSource
from tfdist.errors import UsageError

NUM_BYTES = 256
_VALIDATION_FRACTION = 0.1


class ByteWindows(ExampleSource):
    """Windows of bytes: x is int32 of shape (seq_len,), y the same shifted by one.

    Args:
        content: uint8 array.
        seq_len: bytes of a window.
        batch_size: see `ExampleSource`.
        shuffle: see `ExampleSource`.
        seed: see `ExampleSource`.
    """

    num_classes = NUM_BYTES

    def __init__(
        self, content: np.ndarray, seq_len: int, *, batch_size: int, shuffle: bool = True, seed: "int | None" = None
    ):
        super().__init__(batch_size=batch_size, shuffle=shuffle, seed=seed)
        self._content = content
        self._seq_len = seq_len
        self._tensor: Any = None

    @property
    def num_examples(self) -> int:
        """Number of whole windows."""
        return (len(self._content) - 1) // self._seq_len

    @property
    def element_spec(self) -> Any:
        """Specs of one window and its targets."""
        spec = tf.TensorSpec([self._seq_len], tf.int32)
        return spec, spec

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns windows and targets, int32 of shape (n, seq_len)."""
        if self._tensor is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._tensor = tf.convert_to_tensor(self._content)
        places = indices[:, None] * self._seq_len + tf.range(self._seq_len + 1, dtype=tf.int64)
        tokens = tf.cast(tf.gather(self._tensor, places), tf.int32)
        return tokens[:, :-1], tokens[:, 1:]


def load_text(
    spec: str, path: str, seq_len: int, *, batch_size: int, seed: "int | None" = None
) -> tuple[ByteWindows, "ByteWindows | None"]:
    """Returns (train, validation): the first 90% of the bytes and the last 10%.

    Files of a folder are taken in the order of their paths. There is no validation where the last part is too
    short for a window.

    Args:
        spec: the whole spec, for messages.
        path: a file or a folder.
        seq_len: bytes of a window.
        batch_size: global batch size.
        seed: seed of the order of the windows.
    """
    content = _read(spec, Path(path))
    if len(content) < seq_len + 1:
        raise UsageError(
            f"--data={spec!r}: {path} holds {len(content)} bytes, and one window needs seq_len + 1 = {seq_len + 1}; "
            "give more text or a smaller seq_len"
        )
    cut = len(content) - int(len(content) * _VALIDATION_FRACTION)
    if len(content) - cut < seq_len + 1:
        return ByteWindows(content, seq_len, batch_size=batch_size, seed=seed), None
    train = ByteWindows(content[:cut], seq_len, batch_size=batch_size, seed=seed)
    validation = ByteWindows(content[cut:], seq_len, batch_size=batch_size, shuffle=False)
    if not train.num_examples:
        return ByteWindows(content, seq_len, batch_size=batch_size, seed=seed), None
    return train, validation


def _read(spec: str, path: Path) -> np.ndarray:
    if not path.exists():
        raise UsageError(f"--data={spec!r}: there is no file or folder {str(path)!r}; give one that exists")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise UsageError(f"--data={spec!r}: the folder {str(path)!r} holds no files")
    try:
        content = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"--data={spec!r}: {error.filename} cannot be read: {error.strerror}") from None
    if not content:
        raise UsageError(f"--data={spec!r}: {str(path)!r} is empty")
    return np.frombuffer(content, np.uint8)
