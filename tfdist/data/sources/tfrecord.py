"""TFRecord files of `tf.train.Example`s, read by index.

The files are walked through once, from header to header, to learn where each record begins. After that any record
can be read by itself, so an epoch can have any order and each worker reads its own records only.
"""

import glob
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.source import ExampleSource
from tfdist.errors import UsageError

LABELS = ("label", "y", "target")
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_GZIP = b"\x1f\x8b"


class TFRecordSource(ExampleSource):
    """The records of several files, in the order of their names.

    Args:
        files: paths of the files.
        offsets: for each file, int64 offsets of its records.
        features: how to parse a record: `tf.io.FixedLenFeature`s by name.
        label: which feature is the label, or None.
        buffer_bytes: how much to read at a time.
        batch_size: see `ExampleSource`.
        seed: see `ExampleSource`.
    """

    def __init__(
        self,
        files: list[str],
        offsets: list[np.ndarray],
        features: dict[str, tf.io.FixedLenFeature],
        label: "str | None",
        *,
        buffer_bytes: int,
        batch_size: int,
        seed: "int | None" = None,
    ):
        super().__init__(batch_size=batch_size, seed=seed)
        self._files = files
        self._file_of = np.repeat(np.arange(len(files)), [len(o) for o in offsets])
        self._offsets = np.concatenate(offsets)
        self._features = features
        self._label = label
        self._buffer_bytes = buffer_bytes
        self._index: Any = None

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return len(self._offsets)

    @property
    def element_spec(self) -> Any:
        """Specs of one example: the inputs (a dict where there are several) and the label, where there is one."""
        specs = {name: tf.TensorSpec(feature.shape, feature.dtype) for name, feature in self._features.items()}
        return self._arranged(specs)

    def gather(self, indices: tf.Tensor) -> Any:
        """Reads and parses the records `indices`."""
        if self._index is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._index = (
                    tf.constant(self._files),
                    tf.constant(self._file_of, tf.int64),
                    tf.constant(self._offsets, tf.int64),
                )
        files, file_of, offsets = self._index
        places = (tf.gather(files, tf.gather(file_of, indices)), tf.gather(offsets, indices))
        count = tf.size(indices, tf.int64)
        records = tf.data.Dataset.from_tensor_slices(places).flat_map(self._record).batch(count).get_single_element()
        return self._arranged(tf.io.parse_example(records, self._features))

    def _record(self, file: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
        # Only the op takes an offset; it checks the checksums of length and data as every TFRecord reader does.
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=file[None], compression_type="", buffer_size=self._buffer_bytes, byte_offsets=offset[None]
        )
        return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(1)

    def _arranged(self, parts: dict[str, Any]) -> tuple:
        inputs = {name: part for name, part in parts.items() if name != self._label}
        x = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        return (x,) if self._label is None else (x, parts[self._label])


def load_tfrecord(spec: str, pattern: str, *, batch_size: int, seed: "int | None" = None) -> TFRecordSource:
    """Returns the records of all files that match `pattern`.

    Names, types and shapes of the features are those of the first record. A feature called label, y or target is
    the label.

    Args:
        spec: the whole spec, for messages.
        pattern: a glob.
        batch_size: global batch size.
        seed: seed of the order.
    """
    files = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not files:
        raise UsageError(
            f"--data={spec!r}: no file matches {pattern!r}; give the files, such as tfrecord:data/*.tfrecord"
        )
    indexed = [_index(spec, file) for file in files]
    if not sum(len(offsets) for offsets, _ in indexed):
        raise UsageError(f"--data={spec!r}: the {len(files)} files hold no records")
    first = next(file for file, (offsets, _) in zip(files, indexed, strict=True) if len(offsets))
    features, label = _features(spec, first)
    longest = max(length for _, length in indexed)
    return TFRecordSource(
        files,
        [offsets for offsets, _ in indexed],
        features,
        label,
        buffer_bytes=min(longest + _HEADER.size + _FOOTER_BYTES, 2**20),
        batch_size=batch_size,
        seed=seed,
    )


def _index(spec: str, file: str) -> tuple[np.ndarray, int]:
    """Returns the offsets of the records in `file` and the length of the longest."""
    offsets, longest, offset = [], 0, 0
    size = Path(file).stat().st_size
    with open(file, "rb") as stream:
        if stream.read(2) == _GZIP:
            raise UsageError(f"--data={spec!r}: {file} is compressed with gzip; write the records uncompressed")
        while offset < size:
            stream.seek(offset)
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise UsageError(f"--data={spec!r}: {file} is cut off in the record at byte {offset}")
            length, checksum = _HEADER.unpack(header)
            if _masked_crc(header[:8]) != checksum:
                raise UsageError(f"--data={spec!r}: {file} is damaged, or no TFRecord file, at byte {offset}")
            end = offset + _HEADER.size + length + _FOOTER_BYTES
            if end > size:
                raise UsageError(f"--data={spec!r}: {file} is cut off in the record at byte {offset}")
            offsets.append(offset)
            longest = max(longest, length)
            offset = end
    return np.array(offsets, np.int64), longest


def _features(spec: str, file: str) -> tuple[dict[str, tf.io.FixedLenFeature], "str | None"]:
    with open(file, "rb") as stream:
        length, _ = _HEADER.unpack(stream.read(_HEADER.size))
        record = stream.read(length)
    try:
        example = tf.train.Example.FromString(record)
    except Exception as error:
        raise UsageError(f"--data={spec!r}: the first record of {file} is no tf.train.Example: {error}") from None
    features = {}
    for name in sorted(example.features.feature):
        feature = example.features.feature[name]
        kind = feature.WhichOneof("kind")
        if kind is None:
            raise UsageError(f"--data={spec!r}: feature {name!r} of the first record of {file} is empty")
        values = getattr(feature, kind).value
        dtype = {"float_list": tf.float32, "int64_list": tf.int64, "bytes_list": tf.string}[kind]
        features[name] = tf.io.FixedLenFeature([] if len(values) == 1 else [len(values)], dtype)
    label = next((name for name in LABELS if name in features), None)
    if not features or set(features) == {label}:
        raise UsageError(
            f"--data={spec!r}: the first record of {file} has the features {sorted(features)}; at least one besides "
            "the label is needed"
        )
    return features, label


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """The checksum of TFRecord headers: CRC-32C, rotated and shifted."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
