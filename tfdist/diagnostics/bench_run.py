"""One worker of `tfdist bench`: bench_run.py ROUNDS OUT SIZE... Times all-reduces and checks their sums."""

import json
import os
import sys
import time
from pathlib import Path

import tensorflow as tf

import tfdist
from tfdist.strategy import is_chief, leave_together
from tfdist.training.workers import gathered
from tfdist.transport import CollectiveTransport, Transport


def main(rounds: int, out: Path, sizes: list[int]) -> None:
    """Writes one row for each size, on the chief."""
    strategy = tfdist.make_strategy("multi_worker")
    transport = CollectiveTransport()
    rows = [timed(strategy, transport, size, rounds) for size in sizes]
    if is_chief(strategy):
        temporary = out.with_suffix(".new")
        temporary.write_text(json.dumps(rows))
        temporary.rename(out)
    leave_together(strategy)


def timed(strategy: tf.distribute.Strategy, transport: Transport, size: int, rounds: int) -> dict:
    """Returns the row of one size."""
    replicas = strategy.num_replicas_in_sync
    elements = size // 4
    # Small whole numbers, different in each place and on each worker, whose sums float32 holds exactly.
    places = tf.cast(tf.range(elements) % 251, tf.float32)
    expected = places * replicas + sum(range(replicas))

    @tf.function(autograph=False)
    def run() -> tf.Tensor:
        def on_replica() -> tf.Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return transport.all_reduce(places + tf.cast(replica, tf.float32))

        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    total = run()
    wrong = sum(gathered(strategy, int(tf.math.count_nonzero(total != expected))))
    seconds = []
    for _ in range(rounds):
        gathered(strategy, 0)  # all begin together
        start = time.perf_counter()
        run()[0].numpy()
        seconds.append(time.perf_counter() - start)
    return {
        "transport": transport.name,
        "bytes": size,
        "microseconds": 1e6 * sorted(seconds)[len(seconds) // 2],
        "wrong": wrong,
        "workers": replicas,
    }


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(int(sys.argv[1]), Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
