"""One worker of `tfdist bench`: bench_run.py ROUNDS OUT TRANSPORTS SIZE... Times all-reduces and checks their sums."""

import os
import sys
import time
from pathlib import Path

import tensorflow as tf

import tfdist
from tfdist.command import write_json
from tfdist.strategy import is_chief, leave_together
from tfdist.training.workers import broadcast_int, gathered
from tfdist.transport import Transport, make_transport

_MOST_REPEATS, _REPEATED_BYTES = 50, 64 << 20  # of an all-reduce in one timed call


def main(rounds: int, out: Path, transports: list[str], sizes: list[int]) -> None:
    """Writes one row for each size, on the chief."""
    strategy = tfdist.make_strategy("multi_worker")
    made = [make_transport(name, strategy, lambda value: broadcast_int(strategy, value)) for name in transports]
    rows = [timed(strategy, transport, size, rounds) for transport in made for size in sizes]
    if is_chief(strategy):
        write_json(out, rows)
    leave_together(strategy)


def timed(strategy: tf.distribute.Strategy, transport: Transport, size: int, rounds: int) -> dict:
    """Returns the row of one size."""
    replicas = strategy.num_replicas_in_sync
    elements = size // 4
    # Small whole numbers, different in each place and on each worker, whose sums float32 holds exactly.
    places = tf.cast(tf.range(elements) % 251, tf.float32)
    expected = places * replicas + sum(range(replicas))

    repeats = max(1, min(_MOST_REPEATS, _REPEATED_BYTES // size))

    @tf.function(autograph=False)
    def run(repeats: tf.Tensor) -> tf.Tensor:
        def on_replica() -> tf.Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = places + tf.cast(replica, tf.float32)

            def body(i: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                return i + 1, transport.all_reduce(own)

            start = (tf.constant(0), tf.zeros_like(own))
            return tf.while_loop(lambda i, _: i < repeats, body, start, parallel_iterations=1)[1]

        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    total = run(tf.constant(1))
    wrong = sum(gathered(strategy, int(tf.math.count_nonzero(total != expected))))
    seconds = []
    for _ in range(rounds):
        gathered(strategy, 0)  # all begin together
        start = time.perf_counter()
        run(tf.constant(repeats))[0].numpy()
        seconds.append((time.perf_counter() - start) / repeats)
    return {
        "transport": transport.name,
        "bytes": size,
        "microseconds": 1e6 * sorted(seconds)[len(seconds) // 2],
        "wrong": wrong,
        "workers": replicas,
    }


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), [int(size) for size in sys.argv[4:]])
