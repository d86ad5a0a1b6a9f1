"""Compiled loops over a step: many steps in one `tf.function` call."""

from typing import Any

import tensorflow as tf

from tfdist.data import per_replica
from tfdist.training.options import BatchLayout
from tfdist.training.step import Step


class StepFunctions:
    """The `tf.function`s of one model, traced once for each kind of batch.

    Args:
        step: the step.
        run_eagerly: run Python instead, for debugging.
    """

    def __init__(self, step: Step, *, run_eagerly: bool = False):
        self.step = step
        self.run_eagerly = run_eagerly
        self._cache: dict[tuple, Any] = {}
        self._bound_to: dict[tuple, tuple] = {}

    def train(self, iterator: Any, steps: int, layout: BatchLayout) -> dict[str, tf.Tensor]:
        """Trains `steps` steps on batches from `iterator`; returns the logs after the last of them."""
        return self._run(self.step.train, "train", iterator, steps, layout, with_logs=True)

    def train_silently(self, iterator: Any, steps: int, layout: BatchLayout) -> Any:
        """Trains as `train` does, without the exchange that logs need.

        Returns:
            The logs of the last step, where the model has its own `train_step`; else None.
        """
        return self._run(self.step.train, "train_silently", iterator, steps, layout, with_logs=False)

    def test(self, iterator: Any, steps: int, layout: BatchLayout) -> Any:
        """Evaluates `steps` batches; metrics are read at the end, by `logs`.

        Returns:
            The logs of the last step, where the model has its own `test_step`; else None.
        """
        return self._run(self.step.test, "test", iterator, steps, layout, with_logs=False)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all replicas since they were last reset."""
        return self._function(("logs",), lambda: self.step.logs)()

    def train_batch(self, batch: Any, layout: BatchLayout) -> dict[str, tf.Tensor]:
        """Trains on one per-replica batch `(data, count, total)`; returns the logs."""
        build = self._one_batch(self.step.train, layout, True)
        return self._function(("train_batch", layout), build)(batch)

    def test_batch(self, batch: Any, layout: BatchLayout) -> dict[str, tf.Tensor]:
        """Evaluates one per-replica batch `(data, count, total)`; returns the logs."""
        build = self._one_batch(self.step.test, layout, True)
        return self._function(("test_batch", layout), build)(batch)

    @property
    def trace_count(self) -> int:
        """Number of traces so far, over all functions."""
        return sum(f.experimental_get_tracing_count() for f in self._cache.values() if hasattr(f, "function_spec"))

    def _one_batch(self, run: Any, layout: BatchLayout, with_logs: bool) -> Any:
        return lambda: lambda batch: run(batch, layout, with_logs=with_logs)

    def _run(self, run: Any, name: str, iterator: Any, steps: int, layout: BatchLayout, with_logs: bool) -> Any:
        if steps == 1 or self.run_eagerly:
            for _ in range(steps):
                build = lambda: lambda it: run(self._next(it), layout, with_logs=with_logs)  # noqa: E731
                logs = self._bound((name, layout), build, iterator)(iterator)
            return logs
        build = lambda: lambda it, n: self._loop(run, it, n, layout, with_logs)  # noqa: E731
        return self._function((name, "loop", layout), build)(iterator, tf.constant(steps, tf.int32))

    def _loop(self, run: Any, iterator: Any, steps: tf.Tensor, layout: BatchLayout, with_logs: bool) -> Any:
        """A while loop for all steps but the last, which gives the logs."""

        def body(i: tf.Tensor) -> tuple[tf.Tensor]:
            run(self._next(iterator), layout, with_logs=False)
            return (i + 1,)

        tf.while_loop(lambda i: i < steps - 1, body, (tf.constant(0),), parallel_iterations=1)
        return run(self._next(iterator), layout, with_logs=with_logs)

    def _next(self, iterator: Any) -> Any:
        return per_replica(self.step.strategy, next(iterator))

    def _bound(self, key: tuple, build: Any, iterator: Any) -> Any:
        """Returns the function for this iterator, without the search for it among all traces at every step."""
        first_call = key not in self._cache  # it may create variables, which needs the `tf.function` itself
        function = self._function(key, build)
        if first_call or self.run_eagerly:
            return function
        known = self._bound_to.get(key)
        if known is None or known[0] is not iterator:
            known = self._bound_to[key] = (iterator, function.get_concrete_function(iterator))
        return known[1]

    def _function(self, key: tuple, build: Any) -> Any:
        if key not in self._cache:
            function = build()
            self._cache[key] = (
                function if self.run_eagerly else tf.function(function, reduce_retracing=True, autograph=False)
            )
        return self._cache[key]
