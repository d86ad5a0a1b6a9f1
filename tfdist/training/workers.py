"""Small agreements between the workers of a job, on the host, at rare moments."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.strategy import num_workers, worker_index

_gatherers: "weakref.WeakKeyDictionary[tf.distribute.Strategy, Any]" = weakref.WeakKeyDictionary()


def gathered(strategy: tf.distribute.Strategy, value: int) -> list[int]:
    """Returns `value` of every worker, in worker order. Every worker must call it."""
    if num_workers(strategy) == 1:
        return [value]
    pairs = _gathered_rows(strategy, np.array([[worker_index(strategy), value]], np.int64))
    # Several replicas of one worker say the same, in whichever order.
    by_worker = {int(worker): int(held) for worker, held in pairs}
    return [by_worker[worker] for worker in range(num_workers(strategy))]


def _gathered_rows(strategy: tf.distribute.Strategy, rows: np.ndarray) -> np.ndarray:
    """Returns the int64 rows of all replicas, one replica after the other."""
    if strategy not in _gatherers:
        _gatherers[strategy] = _gatherer(strategy)
    return _gatherers[strategy](tf.constant(rows)).numpy()


def _gatherer(strategy: tf.distribute.Strategy) -> Any:
    """Returns a compiled gather; TensorFlow's eager one is traced anew at every call."""
    reference = weakref.ref(strategy)

    @tf.function(autograph=False)
    def gather(value: tf.Tensor) -> tf.Tensor:
        strategy = reference()

        def on_replica() -> tf.Tensor:
            # The copy has this replica's device; an argument has none to gather on.
            return tf.distribute.get_replica_context().all_gather(tf.identity(value), axis=0)

        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    return gather


def gathered_numbers(strategy: tf.distribute.Strategy, values: Sequence[float]) -> np.ndarray:
    """Returns the numbers of every worker, equally many of each, in shape (workers, numbers). Every worker calls it."""
    own = np.asarray(values, np.float64)
    if num_workers(strategy) == 1:
        return own[None]
    # As whole numbers, which is what travels there; a gather for floats would be one more function to trace.
    bits = own.view(np.int64)
    rows = np.stack([np.full_like(bits, worker_index(strategy)), bits], axis=1)
    pairs = _gathered_rows(strategy, rows).reshape(-1, len(own), 2)
    by_worker = {int(part[0, 0]): part[:, 1].copy().view(np.float64) for part in pairs}
    return np.stack([by_worker[worker] for worker in range(num_workers(strategy))])


def any_of(strategy: tf.distribute.Strategy, flag: bool) -> bool:
    """Whether `flag` is set on any worker. Every worker must call it."""
    return any(gathered(strategy, int(flag)))


def require_equal(strategy: tf.distribute.Strategy, value: int, what: str, fix: str) -> None:
    """Checks that all workers hold the same `value`.

    Raises:
        UsageError: on every worker, saying who holds which value.
    """
    values = gathered(strategy, value)
    if len(set(values)) > 1:
        held = ", ".join(f"worker {i}: {v}" for i, v in enumerate(values))
        raise UsageError(f"{what} differs between the workers ({held}); {fix}")


def broadcast_from_chief(strategy: tf.distribute.Strategy, variables: Sequence) -> None:
    """Sets `variables` to the values they have on worker 0. Every worker must call it."""
    if num_workers(strategy) == 1 or not variables:
        return
    values = [v.value if hasattr(v, "value") and not callable(v.value) else v for v in variables]

    @tf.function(autograph=False)
    def run() -> None:
        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            is_first = tf.equal(context.replica_id_in_sync_group, 0)
            for variable in values:
                value = tf.convert_to_tensor(variable)
                number = tf.cast(value, tf.int64) if not value.dtype.is_floating else value
                total = context.all_reduce(
                    tf.distribute.ReduceOp.SUM, tf.where(is_first, number, tf.zeros_like(number))
                )

                def assign(_: tf.distribute.Strategy, total: tf.Tensor, variable=variable) -> None:
                    strategy.extended.update(
                        variable, lambda v, t: v.assign(tf.cast(t, v.dtype)), args=(total,), group=False
                    )

                context.merge_call(assign, args=(total,))

        strategy.run(on_replica)

    run()


def broadcast_int(strategy: tf.distribute.Strategy, value: int) -> int:
    """Returns worker 0's `value` on every worker."""
    return gathered(strategy, value)[0]
