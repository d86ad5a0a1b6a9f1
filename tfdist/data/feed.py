"""From a source to the batches of this process's replicas.

A feed gives, for each step, a tuple with one `(data, count, total)` for each replica of this process: its rows of
the global batch, how many they are, and how many the global batch has over all replicas. A replica that gets no row
gets one dummy row with a count of 0, so that every model meets at least one row. After the data, steps with a total
of 0 follow without end: a stream that never ends needs no agreement between workers on whether all of them still
have data, which TensorFlow's distributed iterators otherwise seek at every step.
"""

import functools
import logging
import random
import threading
import warnings
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.layout import Layout
from tfdist.data.rows import num_rows, slice_rows, zero_rows
from tfdist.data.source import BatchSource, ExampleSource
from tfdist.errors import PeerError, UsageError
from tfdist.strategy import global_seed, is_distributed, num_local_replicas

_log = logging.getLogger("tfdist")

PRESHARDED_TOTAL = -1
"""The total of a batch whose owner gave each worker its part: the step sums the counts."""


_STEPS_AHEAD = 2

# Autograph would rewrite these functions, which have nothing to rewrite, at each fit anew.
_plain = tf.autograph.experimental.do_not_convert


def make_feed(
    source: "ExampleSource | BatchSource",
    where: "tf.distribute.Strategy | Layout",
    *,
    seed: "int | None" = None,
    seed_offset: int = 0,
) -> "Feed":
    """Returns the feed of `source` for the replicas of this process.

    Args:
        source: the data.
        where: a strategy, or the layout of its replicas.
        seed: seed of the order, instead of the source's or the job's.
        seed_offset: added to the seed, so that several trainings on one source see different orders.
    """
    layout = where if isinstance(where, Layout) else Layout.of(where)
    size = source.batch_size if isinstance(source, ExampleSource) else None
    if size is not None and size < layout.num_replicas:
        _log.warning(
            "batch_size=%d is smaller than the %d replicas, so some have nothing to do in any step; use a larger batch "
            "or fewer replicas",
            size,
            layout.num_replicas,
        )
    if isinstance(source, ExampleSource):
        feed = ExampleFeed(source, layout, seed_offset)
        if seed is not None:
            feed.seed = seed
        return feed
    if isinstance(source, BatchSource):
        return BatchFeed(source, layout)
    raise UsageError(f"{type(source).__name__} is no source of data; see tfdist.data.as_source")


class Feed:
    """What both kinds of feeds have in common.

    Attributes:
        layout: the replicas.
        element_spec: specs of a batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        batch_size: examples of a full global batch, where known.
        steps_per_epoch: global batches of an epoch, where known.
        may_end: whether the data may end before `steps_per_epoch`, or where only its end tells.
        full_batches: every replica has the same number of rows in every batch.
        presharded: each worker has its own part of the global batches.
        seed: seed of the order.
    """

    layout: Layout
    element_spec: Any
    batch_size: "int | None" = None
    steps_per_epoch: "int | None" = None
    may_end: bool = False
    full_batches: bool = False
    presharded: bool = False
    seed: int = 0

    def dataset(self, epoch: int, start_step: int = 0) -> tf.data.Dataset:
        """Returns the endless dataset of steps, each a tuple of the local replicas' `(data, count, total)`."""
        raise NotImplementedError

    def begin_epoch(
        self, strategy: tf.distribute.Strategy, epoch: int, start_step: int = 0
    ) -> tuple[Any, "int | None"]:
        """Returns an iterator, see `iterator`, and the number of steps that the epoch still has."""
        steps = None if self.steps_per_epoch is None else self.steps_per_epoch - start_step
        return self.iterator(strategy, epoch, start_step), steps

    def end_epoch(self, steps: int) -> None:
        """Is told after each epoch how many steps it had."""

    def restart(self) -> None:
        """Makes the next epoch begin at the start of the data, also where a number of steps was given."""

    def iterator(self, strategy: tf.distribute.Strategy, epoch: int, start_step: int = 0) -> Any:
        """Returns an iterator for use inside a `tf.function`: `per_replica` takes what `next` gives."""
        return _distributed(self.dataset(epoch, start_step), strategy)

    @property
    def num_examples(self) -> "int | None":
        """Examples of an epoch, where known before any is read."""
        return None

    def early_fingerprint(self) -> int:
        """Returns a hash of what is known of the data before the first step, for comparison between workers."""
        return zlib.crc32(repr(self.element_spec).encode())

    def fingerprint(self) -> "int | None":
        """Returns a hash of the first global batch read, for comparison between workers; None where none is needed."""
        return None


class ExampleFeed(Feed):
    """The batches of an `ExampleSource`.

    Args:
        source: the examples.
        layout: the replicas.
        seed_offset: see `make_feed`.
    """

    def __init__(self, source: ExampleSource, layout: Layout, seed_offset: int = 0):
        self.source = source
        self.layout = layout
        self.batch_size = source.batch_size
        self.steps_per_epoch = source.steps or source.steps_per_epoch
        if not source.steps_per_epoch:
            raise UsageError(
                f"batch_size={source.batch_size}: there are only {source.num_examples} examples and a last batch that "
                "is not full is left out, so an epoch has no batch; use a smaller batch_size"
            )
        even = source.batch_size % layout.num_replicas == 0
        whole = source.drop_remainder or source.num_examples % source.batch_size == 0
        self.full_batches = even and whole
        seed = source.seed if source.seed is not None else global_seed()
        self.seed = (random.SystemRandom().randrange(2**31) if seed is None else int(seed)) + seed_offset
        rows = source.batch_size // layout.num_replicas if self.full_batches else None
        self.element_spec = tf.nest.map_structure(lambda spec: _batched(spec, None), source.element_spec)
        self._rows = rows
        self._open: Any = None
        self._open_at: tuple | None = None
        self._open_steps = 0

    def dataset(self, epoch: int, start_step: int = 0) -> tf.data.Dataset:
        """Returns the steps of one epoch, followed by steps with a total of 0."""
        number, first, steps = self._place(epoch)
        end = tf.data.Dataset.from_tensors((self.source.order(number, self.seed), tf.constant(-1, tf.int64))).repeat()
        ordered = self._ordered(number, first + start_step).take(steps - start_step)
        return self._gathered(ordered.concatenate(end))

    def begin_epoch(
        self, strategy: tf.distribute.Strategy, epoch: int, start_step: int = 0
    ) -> tuple[Any, "int | None"]:
        """Returns an iterator and the steps of the epoch; an epoch that follows the last one shares its iterator."""
        number, first, steps = self._place(epoch)
        first, steps = first + start_step, steps - start_step
        if self._open is None or self._open_at != self._key(strategy, number, first):
            self._open = _distributed(self._gathered(self._passes(number, first)), strategy)
        ends = first + steps == self.source.steps_per_epoch
        self._open_at = self._key(strategy, number + 1, 0) if ends else self._key(strategy, number, first + steps)
        self._open_steps = steps
        return self._open, steps

    def _key(self, strategy: tf.distribute.Strategy, number: int, step: int) -> tuple:
        return strategy, self.seed, number if self.source.shuffle else 0, step

    def _place(self, epoch: int) -> tuple[int, int, int]:
        """Returns in which pass over the examples `epoch` begins, at which step of it, and how many steps it has."""
        whole, limit = self.source.steps_per_epoch, self.source.steps
        if limit is None:
            return epoch, 0, whole
        number, part = divmod(epoch, -(-whole // limit))
        steps = min(limit, whole - part * limit)
        if steps < limit:
            _warn_of_short_epoch(steps, limit)
        return number, part * limit, steps

    def end_epoch(self, steps: int) -> None:
        """Keeps the iterator for the next epoch, unless the epoch was left early."""
        if steps != self._open_steps:
            self._open = None

    def _passes(self, number: int, start_step: int) -> tf.data.Dataset:
        """Returns the steps of pass `number` and all that follow: a new iterator each epoch would cost tens of ms."""
        first = tf.constant(number, tf.int64)
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return (
            tf.data.Dataset.counter(number)
            .flat_map(_plain(lambda n: self._ordered(n, tf.where(n == first, start_step, 0))))
            .apply(endless)
        )

    def _ordered(self, number: Any, start_step: Any) -> tf.data.Dataset:
        """Returns (order, step) for each step of one pass.

        Only TensorFlow ops: Python in a pipeline that reads ahead can hang the interpreter when it exits.
        """
        order = tf.data.Dataset.from_tensors(self.source.order(number, self.seed)).repeat()
        return tf.data.Dataset.zip(
            order, tf.data.Dataset.range(tf.cast(start_step, tf.int64), self.source.steps_per_epoch)
        )

    def _gathered(self, ordered: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the steps that `ordered` names; a negative one has a total of 0."""
        source, layout = self.source, self.layout

        def gather(order: tf.Tensor, step: tf.Tensor) -> tuple:
            left = source.num_examples - step * source.batch_size
            total = tf.where(step < 0, tf.zeros_like(step), tf.minimum(tf.cast(source.batch_size, tf.int64), left))
            replicas = range(layout.first_replica, layout.first_replica + layout.local_replicas)
            return tuple(part(order, tf.maximum(step, 0), total, replica) for replica in replicas)

        def part(order: tf.Tensor, step: tf.Tensor, total: tf.Tensor, replica: int) -> tuple:
            start, count = layout.rows(total, replica)
            # A replica without rows has the batch's first example as its dummy.
            start = step * source.batch_size + tf.where(count > 0, start, 0)
            size = tf.maximum(count, 1) if self._rows is None else self._rows
            data = source.gather(order[start : start + size])
            if self._rows is not None:
                data = tf.nest.map_structure(lambda t: _with_rows(t, self._rows), data)
            return data, tf.cast(count, tf.int32), tf.cast(total, tf.int32)

        steps = ordered.map(_plain(gather), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        # There is nothing to rewrite, and looking for it would take a third of the time that an iterator takes.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        return _without_tuner(steps.prefetch(_STEPS_AHEAD).with_options(options))

    @property
    def num_examples(self) -> int:
        """Examples of an epoch."""
        return self.source.num_examples

    def early_fingerprint(self) -> int:
        """Returns a hash of the spec, the first batch's order, and its first examples."""
        first = self.source.order(0, self.seed)[: self.source.batch_size]
        few = tf.data.Dataset.from_tensors(first[:4]).map(self.source.gather).get_single_element()
        leaves = [leaf.numpy() for leaf in tf.nest.flatten(few, expand_composites=True)]
        return _crc([np.asarray(first), *leaves], super().early_fingerprint())


class BatchFeed(Feed):
    """The batches of a `BatchSource`.

    Args:
        source: the stream.
        layout: the replicas.
    """

    def __init__(self, source: BatchSource, layout: Layout):
        self.source = source
        self.layout = layout
        self._batches = source.make()
        spec = self._batches.element_spec
        self.element_spec = spec = spec if isinstance(spec, tuple) else (spec,)
        leaf = tf.nest.flatten(spec)[0]
        self.batch_size = leaf.shape[0] if leaf.shape.rank else None
        self.presharded = source.presharded and not layout.is_whole
        shares = layout.local if self.presharded else layout
        self._shares = shares
        # A presharded worker may run out before the others, so its batches can be empty.
        static = self.batch_size is not None and self.batch_size % shares.num_replicas == 0
        self.full_batches = static and not self.presharded
        self.steps_per_epoch = source.steps or source.num_batches
        self.may_end = not source.infinite and source.num_batches is None and not self.presharded
        self.seed = global_seed() or 0
        compared = source.fingerprinted and not layout.is_whole and not self.presharded
        self._first_batch = _FirstBatch() if compared else None
        self._continued: Any = None
        self._begun = False
        self._seen = 0

    def dataset(self, epoch: int, start_step: int = 0) -> tf.data.Dataset:
        """Returns the endless dataset of steps."""
        batches = self._batches
        if start_step:
            batches = batches.skip(start_step)
        if self._first_batch is not None:
            batches = self._first_batch.watch(batches.map(_plain(lambda *data: data)))

        def step(data: Any, alive: Any) -> tuple:
            return tuple(self._element(data, alive, i) for i in range(self.layout.local_replicas))

        if not self.may_end and not self.presharded:
            # Nobody asks for more batches than there are, so the end needs no mark.
            steps = batches.map(_plain(lambda *data: step(data, True)), tf.data.AUTOTUNE, deterministic=True)
            return _without_tuner(steps.prefetch(_STEPS_AHEAD))
        end = tf.data.Dataset.from_tensors((zero_rows(self.element_spec), False)).repeat()
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        steps = batches.map(_plain(lambda *data: (data, True))).concatenate(end)
        steps = steps.map(_plain(step), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return _without_tuner(steps.apply(endless).prefetch(_STEPS_AHEAD))

    def begin_epoch(
        self, strategy: tf.distribute.Strategy, epoch: int, start_step: int = 0
    ) -> tuple[Any, "int | None"]:
        """Returns an iterator and the steps of the epoch; with a number of steps given, the stream goes on."""
        self.source.on_epoch_begin()
        if self.source.steps is None:
            if epoch and self._seen == 0 and self._continued is None:
                self._replay(epoch)
            self._continued = ()
            return super().begin_epoch(strategy, epoch, start_step)
        steps = self.source.steps - start_step
        if self._continued is None:
            if not self._begun:
                self._seen = self._batches_seen_before(epoch) + start_step
            self._continued = self.iterator(strategy, epoch, self._seen)
        self._begun = True
        if self.source.num_batches is not None:
            left = self.source.num_batches - self._seen
            if steps > left:
                _warn_of_short_epoch(left, steps)
            steps = min(steps, left)
        return self._continued, steps

    def end_epoch(self, steps: int) -> None:
        """Keeps the stream for the next epoch, or starts it anew where it is used up."""
        self.source.on_epoch_end()
        if self.source.steps is None:
            return
        self._seen += steps
        used_up = self.source.num_batches is not None and self._seen >= self.source.num_batches
        if used_up or (self.may_end and steps < self.source.steps):
            self._continued, self._seen = None, 0

    def restart(self) -> None:
        """Makes the next epoch begin at the start of the stream; one that can be read once only goes on."""
        if not self.source.one_shot:
            self._continued, self._seen = None, 0

    def _batches_seen_before(self, epoch: int) -> int:
        """Returns where in the stream `epoch` begins; an epoch that reaches its end is cut."""
        steps, batches = self.source.steps, self.source.num_batches
        return epoch * steps if batches is None else epoch % -(-batches // steps) * steps

    def _replay(self, epochs: int) -> None:
        """Begins the iterations of the epochs before, which is what advances the seeds of its shuffles."""
        for _ in range(epochs):
            iter(self._batches)

    def fingerprint(self) -> "int | None":
        """Returns a hash of the first global batch, once it has been read."""
        return None if self._first_batch is None else self._first_batch.value()

    def _element(self, data: Any, alive: Any, local_replica: Any) -> tuple:
        shares = self._shares
        replica = shares.first_replica + local_replica
        total = num_rows(data)
        if shares.num_replicas == 1:
            part, count = data, tf.convert_to_tensor(total, tf.int32)
        elif self.full_batches:
            size: Any = total // shares.num_replicas
            part = slice_rows(data, replica * size, size)
            count = tf.constant(size, tf.int32)
        else:
            start, count = shares.rows(tf.convert_to_tensor(total, tf.int32), replica)
            start = tf.where(count > 0, start, 0)
            part = slice_rows(data, start, tf.maximum(count, 1))
        alive = tf.cast(alive, tf.int32)
        total = tf.convert_to_tensor(PRESHARDED_TOTAL if self.presharded else total, tf.int32)
        return part, count * alive, total if self.presharded else total * alive


class _FirstBatch:
    """Takes the hash of the first batch that passes by."""

    def __init__(self):
        self._known = threading.Event()
        self._value = 0

    def watch(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns `batches` as they are."""

        def look(index: tf.Tensor, data: Any) -> Any:
            flat = tf.nest.flatten(data, expand_composites=True)
            seen = tf.cond(
                tf.equal(index, 0),
                lambda: tf.numpy_function(self._take, flat, tf.int64),
                lambda: tf.constant(0, tf.int64),
            )
            with tf.control_dependencies([seen]):
                return tf.nest.map_structure(tf.identity, data, expand_composites=True)

        return batches.enumerate().map(_plain(look))

    def _take(self, *arrays: np.ndarray) -> np.int64:
        value = _crc(arrays)
        if not self._known.is_set():
            self._value = value
            self._known.set()
        return np.int64(value)

    def value(self, timeout_s: float = 600.0) -> int:
        """Returns the hash, after waiting for the first batch."""
        if not self._known.wait(timeout_s):
            raise PeerError(f"the dataset gave no first batch within {timeout_s:.0f} s")
        return self._value


def _warn_of_short_epoch(left: int, steps: int) -> None:
    warnings.warn(
        f"the data has {left} batches left, fewer than the {steps} steps that were asked for; the epoch is shorter "
        "(use dataset.repeat() to go on)",
        stacklevel=4,
    )


def _crc(arrays: Iterable[np.ndarray], value: int = 0) -> int:
    for array in arrays:
        raw = b"\0".join(array.reshape(-1).tolist()) if array.dtype == object else array.tobytes()
        value = zlib.crc32(raw, value)
    return value


def per_replica(strategy: tf.distribute.Strategy, step: tuple) -> Any:
    """Returns what a feed's iterator gave for a step as per-replica `(data, count, total)`, for `strategy.run`."""
    if len(step) == 1:
        return step[0]
    first = Layout.of(strategy).first_replica
    return strategy.experimental_distribute_values_from_function(
        lambda context: step[int(context.replica_id_in_sync_group) - first]
    )


def _distributed(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options)
    devices = strategy.extended.parameter_devices if is_distributed(strategy) else ("",)
    on_gpus = any("GPU" in device for device in devices)
    if on_gpus and num_local_replicas(strategy) > 1:
        # TensorFlow deals the replicas' parts out one by one, and has them on their devices ahead of time.
        parts = dataset.flat_map(_plain(_one_by_one))
        return iter(strategy.distribute_datasets_from_function(lambda context: parts))
    if on_gpus:
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device(devices[0]))
    return iter(dataset)


def _one_by_one(*step: tuple) -> tf.data.Dataset:
    parts = [tf.data.Dataset.from_tensors((part,)) for part in step]
    return functools.reduce(tf.data.Dataset.concatenate, parts)


def _without_tuner(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns tf.data's autotuner off, unless the user has turned it on.

    Its thread can miss the end of its iterator and sleep on for up to a minute; whoever drops the iterator waits for
    it and holds the interpreter's lock meanwhile. Without it, AUTOTUNE means up to 16 calls at a time.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _batched(spec: tf.TypeSpec, rows: "int | None") -> tf.TypeSpec:
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([rows, *spec.shape], spec.dtype, spec.ragged_rank + 1, spec.row_splits_dtype)
    return tf.TensorSpec([rows, *spec.shape], spec.dtype)


def _with_rows(tensor: Any, rows: int) -> Any:
    if isinstance(tensor, tf.Tensor):
        tensor.set_shape([rows, *tensor.shape[1:]])
    return tensor
