"""What a transport does between the replicas of a job, measured."""

import dataclasses
import time

import numpy as np
import tensorflow as tf

from tfdist.transport.base import Transport

_SMALL, _LARGE = 1, 1 << 20  # elements of 4 bytes
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

    def seconds(self, size: float) -> float:
        """Returns the time of an all-reduce of `size` bytes."""
        return self.latency_s + size / self.bytes_per_second


def measure(strategy: tf.distribute.Strategy, transport: Transport) -> Link:
    """Returns what `transport` does, by medians of a few all-reduces. Every worker must call it."""
    seconds = {}
    for size in (_SMALL, _LARGE):

        @tf.function(autograph=False)
        def once(size: int = size) -> tf.Tensor:
            def on_replica() -> tf.Tensor:
                return transport.all_reduce(tf.ones([size]))[0] if transport.takes_part() else tf.zeros([])

            return strategy.experimental_local_results(strategy.run(on_replica))[0]

        once().numpy()
        seconds[size] = float(np.median([_timed(once) for _ in range(_ROUNDS)]))
    latency, large = seconds[_SMALL], seconds[_LARGE]
    return Link(latency, 4 * _LARGE / max(large - latency, 1e-6))


def _timed(run: tf.types.experimental.PolymorphicFunction) -> float:
    start = time.perf_counter()
    run().numpy()
    return time.perf_counter() - start
