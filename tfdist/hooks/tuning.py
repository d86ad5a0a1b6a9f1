"""The size of buckets, from what the link between the replicas can do."""

import dataclasses
import time

import numpy as np
import tensorflow as tf

from tfdist.hooks.buckets import MEBIBYTE
from tfdist.transport import Transport

SMALLEST_MB, LARGEST_MB = 0.5, 8.0
_LATENCY_SHARE = 0.1
_SMALL, _LARGE = 1, MEBIBYTE  # elements of 4 bytes
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Link:
    """What a transport does between the replicas of a job.

    Attributes:
        latency_s: seconds of an all-reduce of one number.
        bytes_per_second: of a large all-reduce, latency taken off.
    """

    latency_s: float
    bytes_per_second: float

    @property
    def bucket_mb(self) -> float:
        """The size in MiB at which latency is a tenth of a bucket's time: smaller ones cost, larger ones come late."""
        share = (1 - _LATENCY_SHARE) / _LATENCY_SHARE
        size = self.latency_s * share * self.bytes_per_second / MEBIBYTE
        return float(np.clip(round(size, 2), SMALLEST_MB, LARGEST_MB))


def measure(strategy: tf.distribute.Strategy, transport: Transport) -> Link:
    """Returns what `transport` does, by medians of a few all-reduces. Every worker must call it."""
    seconds = {}
    for size in (_SMALL, _LARGE):

        @tf.function(autograph=False)
        def once(size: int = size) -> tf.Tensor:
            def on_replica() -> tf.Tensor:
                return transport.all_reduce(tf.ones([size]))[0]

            return strategy.experimental_local_results(strategy.run(on_replica))[0]

        once().numpy()
        seconds[size] = float(np.median([_timed(once) for _ in range(_ROUNDS)]))
    latency, large = seconds[_SMALL], seconds[_LARGE]
    return Link(latency, 4 * _LARGE / max(large - latency, 1e-6))


def _timed(run: tf.types.experimental.PolymorphicFunction) -> float:
    start = time.perf_counter()
    run().numpy()
    return time.perf_counter() - start
