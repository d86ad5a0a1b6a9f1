"""Data: sources, their division over replicas and workers, the resumable position."""

from tfdist.data.adapt import as_source, class_weights_of, from_keras, split_validation, unpack_validation
from tfdist.data.audit import AuditReport, WorkerShare, audit
from tfdist.data.feed import Feed, make_feed, per_replica
from tfdist.data.layout import Layout
from tfdist.data.position import Position
from tfdist.data.rows import num_rows, slice_rows
from tfdist.data.source import ArraySource, BatchSource, ExampleSource
from tfdist.data.sources import Datasets, check_labels, is_function, load

__all__ = [
    "ArraySource",
    "AuditReport",
    "BatchSource",
    "Datasets",
    "ExampleSource",
    "Feed",
    "Layout",
    "Position",
    "WorkerShare",
    "as_source",
    "audit",
    "check_labels",
    "class_weights_of",
    "from_keras",
    "is_function",
    "load",
    "make_feed",
    "per_replica",
    "num_rows",
    "slice_rows",
    "split_validation",
    "unpack_validation",
]
