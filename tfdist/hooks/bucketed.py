"""The base of hooks that work bucket by bucket."""

import abc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.hooks.base import Gradient, Hook, HookReport
from tfdist.hooks.buckets import MEBIBYTE, make_buckets
from tfdist.hooks.message import Message
from tfdist.transport import Link, Request, measure

AUTO = "auto"
_UNTUNED_MB = 4.0
_FITTING_MB = (0.5, 8.0)
_LATENCY_SHARE = 0.1
_log = logging.getLogger("tfdist")


class BucketedHook(Hook):
    """Lays gradients out in buckets; a subclass says how one bucket is summed.

    Sparse gradients are gathered and stay sparse, with exact hooks also where a dense sum would be smaller: Keras's
    adaptive optimizers square the parts of a row that occurs twice one by one, so a dense sum would train unlike one
    device. Lossy hooks make them dense where that is smaller.

    Args:
        bucket_mb: largest size of a bucket in MiB. "auto" measures the link between the workers before the first step
            and takes the size at which latency is a tenth of a bucket's time.
    """

    def __init__(self, *, bucket_mb: "float | str" = AUTO):
        super().__init__()
        is_size = isinstance(bucket_mb, int | float) and not isinstance(bucket_mb, bool) and bucket_mb > 0
        if bucket_mb != AUTO and not is_size:
            raise UsageError(
                f"bucket_mb={bucket_mb!r}: a size in MiB above 0 is needed, or auto; e.g. {self.name}:bucket_mb=4"
            )
        self._is_auto = bucket_mb == AUTO
        self.bucket_mb = _UNTUNED_MB if self._is_auto else float(bucket_mb)
        self._costs: dict[tuple[int, ...], tuple[int, int]] = {}

    def tune(self, strategy: tf.distribute.Strategy, agree: Callable[[int], int]) -> None:
        """Measures the link and chooses the size of buckets, unless the user has; the log says what was found."""
        if not self._is_auto or not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return
        if strategy.num_replicas_in_sync == 1:
            return
        link = measure(strategy, self.transport)
        self.bucket_mb = agree(round(_fitting_mb(link) * 1000)) / 1000
        _log.info(
            "hook %s: bucket_mb=%.2f, as an all-reduce takes %.1f ms and moves %.0f MB/s here",
            self.name,
            self.bucket_mb,
            1e3 * link.latency_s,
            link.bytes_per_second / 1e6,
        )

    @abc.abstractmethod
    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Says what travels for one bucket.

        Args:
            buffer: this replica's gradients, of shape (elements,).
            variables: all variables of the step, whose buckets come one after the other.
        """

    def end_step(self, totals: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:  # noqa: B027
        """Is called in replica context with the sums of a step's dense gradients; most hooks do nothing."""

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns the sum of `gradients` over all replicas (see `Hook.aggregate`)."""
        return self.exchange(gradients, variables)[0]

    def exchange(
        self, gradients: list[Gradient], variables: Sequence[keras.Variable]
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Returns the sums over all replicas, and what this replica has put into each."""
        if self.transport.participants() == 1 or not gradients:
            return list(gradients), list(gradients)
        shaped = [_shaped(g, v) for g, v in zip(self.smallest(gradients, variables), variables, strict=True)]
        totals, own, sent = self.exchange_step(shaped, variables)
        all_dense = sum(self.dense_bytes(v) for v in variables)
        self._costs[tuple(id(v) for v in variables)] = sent, all_dense
        return totals, own

    def smallest(self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Returns `gradients`; a lossy hook makes sparse ones dense where fewer bytes travel then."""
        pairs = zip(gradients, variables, strict=True)
        return [tf.convert_to_tensor(g) if self.lossy and self._is_smaller_dense(g, v) else g for g, v in pairs]

    def exchange_step(
        self, gradients: list[Gradient], variables: Sequence[keras.Variable]
    ) -> tuple[list[Gradient], list[Gradient], int]:
        """Does what `exchange` does on several replicas; returns the bytes that this one sends as well."""
        totals: list[Any] = [None] * len(gradients)
        own: list[Any] = list(gradients)
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
        sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        packed = [gradients[i] for i in dense]
        buckets = make_buckets(packed, self.bucket_bytes)
        messages = [self.encode(bucket.pack(packed), variables) for bucket in buckets]
        requests = [Request(message.payload, "gather" if message.gathered else "sum") for message in messages]
        for i in sparse:
            requests += [Request(gradients[i].values, "rows"), Request(gradients[i].indices, "rows")]
        results, sent = self._exchanged(requests)
        for bucket, message in zip(buckets, messages, strict=True):
            parts = zip(bucket.unpack(message.decode(results.pop(0))), bucket.unpack(message.own), strict=True)
            for i, (part, own_part) in zip(bucket.indices, parts, strict=True):
                totals[dense[i]], own[dense[i]] = part, own_part
        for i in sparse:
            values, indices = results.pop(0), results.pop(0)
            totals[i] = tf.IndexedSlices(values, indices, gradients[i].dense_shape)
        self.end_step([totals[i] for i in dense], variables)
        return totals, own, sent

    @property
    def report(self) -> "HookReport | None":
        """What one replica sends in a step."""
        if not self._costs:
            return None
        return HookReport(*map(sum, zip(*self._costs.values(), strict=True)))

    @property
    def bucket_bytes(self) -> float:
        """Largest size of a bucket in bytes."""
        return self.bucket_mb * MEBIBYTE

    def dense_bytes(self, variable: keras.Variable) -> int:
        """Returns what one replica sends for the exact all-reduce of a dense gradient of `variable`."""
        return self.transport.bytes_sent(Request(tf.convert_to_tensor(variable.value)))

    def sum_exactly(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], int]:
        """Returns the exact sums of `tensors` over all replicas, and the bytes that this one sends for them."""
        totals: list[Any] = [None] * len(tensors)
        buckets = make_buckets(tensors, self.bucket_bytes)
        results, sent = self._exchanged([Request(bucket.pack(tensors)) for bucket in buckets])
        for bucket, result in zip(buckets, results, strict=True):
            for i, part in zip(bucket.indices, bucket.unpack(result), strict=True):
                totals[i] = part
        return totals, sent

    def _is_smaller_dense(self, gradient: Gradient, variable: keras.Variable) -> bool:
        if not isinstance(gradient, tf.IndexedSlices) or not gradient.values.shape.is_fully_defined():
            return False
        return self.dense_bytes(variable) < self.transport.bytes_sent(Request(gradient.values, "rows"))

    def _exchanged(self, requests: Sequence[Request]) -> tuple[list[tf.Tensor], int]:
        sent = sum(self.transport.bytes_sent(request) for request in requests)
        return self.transport.exchange(requests), sent


def _fitting_mb(link: Link) -> float:
    """Returns the size at which latency is a tenth of a bucket's time: smaller ones cost, larger ones come late."""
    size = link.latency_s * (1 - _LATENCY_SHARE) / _LATENCY_SHARE * link.bytes_per_second / MEBIBYTE
    return float(np.clip(round(size, 2), *_FITTING_MB))


def _shaped(gradient: Gradient, variable: keras.Variable) -> Gradient:
    """Returns a dense gradient with its variable's shape, which the backward pass does not always know."""
    if isinstance(gradient, tf.IndexedSlices) or gradient.shape.is_fully_defined():
        return gradient
    return tf.reshape(gradient, variable.shape)
