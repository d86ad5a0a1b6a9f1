"""Data: sources, their division over replicas and workers, the resumable position."""

from tfdist.data.adapt import as_source, class_weights_of, from_keras, split_validation, unpack_validation
from tfdist.data.feed import Feed, make_feed
from tfdist.data.layout import Layout
from tfdist.data.position import Position
from tfdist.data.rows import num_rows, slice_rows
from tfdist.data.source import ArraySource, BatchSource, ExampleSource

__all__ = [
    "ArraySource",
    "BatchSource",
    "ExampleSource",
    "Feed",
    "Layout",
    "Position",
    "as_source",
    "class_weights_of",
    "from_keras",
    "make_feed",
    "num_rows",
    "slice_rows",
    "split_validation",
    "unpack_validation",
]
