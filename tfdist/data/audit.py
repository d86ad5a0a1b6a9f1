"""Who reads which share of the data, and is anything dropped or read twice?"""

import collections
import dataclasses
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.adapt import as_source
from tfdist.data.feed import make_feed
from tfdist.data.layout import Layout
from tfdist.data.rows import num_rows
from tfdist.data.source import BatchSource
from tfdist.errors import UsageError


@dataclasses.dataclass(frozen=True)
class WorkerShare:
    """What one worker read in an epoch.

    Attributes:
        worker: which one.
        examples: examples read.
        share: their part of all examples of the data, 0..1.
        steps: global batches.
    """

    worker: int
    examples: int
    share: float
    steps: int


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of `audit`.

    Attributes:
        num_examples: examples of one pass over the data.
        workers: what each worker read.
        dropped: examples that no worker read.
        read_twice: examples that were read more often than the data holds them.
        likely_cause: what may be wrong, or "".
    """

    num_examples: int
    workers: tuple[WorkerShare, ...]
    dropped: int
    read_twice: int
    likely_cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether every example was read exactly once and all workers have the same number of steps."""
        return not self.dropped and not self.read_twice and len({w.steps for w in self.workers}) <= 1

    def __str__(self) -> str:
        """A table."""
        lines = [f"{'worker':>6} {'examples':>9} {'share':>7} {'steps':>6}"]
        lines += [f"{w.worker:>6} {w.examples:>9} {w.share:>7.1%} {w.steps:>6}" for w in self.workers]
        lines.append(f"{self.num_examples} examples: {self.dropped} dropped, {self.read_twice} read twice")
        lines.append("ok" if self.ok else f"NOT OK{': ' + self.likely_cause if self.likely_cause else ''}")
        return "\n".join(lines)


def audit(dataset: Any, *, workers: int = 2, replicas_per_worker: int = 1, epoch: int = 0) -> AuditReport:
    """Reads one epoch as each of `workers` would, one after the other, and compares with reading it once.

    Examples are told apart by their content. Equal ones are counted.

    Args:
        dataset: what `fit` or `TrainLoop` take: a source, a finite `tf.data.Dataset` of global batches, arrays (x, y).
        workers: how many workers to play.
        replicas_per_worker: replicas of each.
        epoch: which epoch.
    """
    for name, value in (("workers", workers), ("replicas_per_worker", replicas_per_worker)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r}: an integer of at least 1 is needed")
    source = as_source(dataset)
    if isinstance(source, BatchSource) and (source.infinite or source.one_shot):
        raise UsageError("audit reads the data several times to its end; give a finite dataset that can be read again")
    whole, _ = _read(source, Layout(1, 0, 1), epoch)
    num_replicas = workers * replicas_per_worker
    read: collections.Counter = collections.Counter()
    shares = []
    total = sum(whole.values())
    for worker in range(workers):
        layout = Layout(num_replicas, worker * replicas_per_worker, replicas_per_worker)
        found, steps = _read(source, layout, epoch)
        read.update(found)
        count = sum(found.values())
        shares.append(WorkerShare(worker, count, count / total if total else 0.0, steps))
    dropped, twice = sum((whole - read).values()), sum((read - whole).values())
    cause = ""
    if (dropped or twice) and isinstance(source, BatchSource):
        cause = "the pipeline gives another order each time it is read; seed its shuffles, or make it deterministic"
    return AuditReport(total, tuple(shares), dropped, twice, cause)


def _read(source: Any, layout: Layout, epoch: int) -> tuple[collections.Counter, int]:
    """Returns how often each example was read by the layout's local replicas, and the number of steps."""
    seen: collections.Counter = collections.Counter()
    feed = make_feed(source, layout, seed=0 if getattr(source, "seed", None) is None else None)
    steps = 0
    for step in feed.dataset(epoch):
        if int(step[0][2]) == 0:
            break
        steps += 1
        for data, count, _ in step:
            seen.update(_row_digests(data)[: int(count)])
    return seen, steps


def _row_digests(data: Any) -> list[bytes]:
    digests = [hashlib.blake2b(digest_size=16) for _ in range(int(num_rows(data)))]
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.SparseTensor):
            leaf = tf.sparse.to_dense(leaf)
        for digest, row in zip(digests, leaf, strict=True):
            values = row.numpy() if not isinstance(row, tf.RaggedTensor) else np.asarray(str(row.to_list()))
            values = np.asarray(values)
            digest.update(repr(values.tolist()).encode() if values.dtype == object else values.tobytes())
    return [digest.digest() for digest in digests]
