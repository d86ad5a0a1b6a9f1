"""Compiled loops over a step: many steps in one `tf.function` call."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data import per_replica
from tfdist.liveness.beat import COMPUTING, READING
from tfdist.training.options import BatchLayout
from tfdist.training.stamps import held, stamp
from tfdist.training.step import Logs, Step


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a call that trained gives.

    Attributes:
        logs: of the last step; None where none are wanted (a model with its own `train_step` gives them anyway).
        begins: when each step began, and when its input was there: a tensor of shape (steps, 2), or nested scalars in
            that order, which cost a step less than to join them. None where the steps are not timed, or the batch was
            fetched outside of the call.
        intervals: begin and end of each aggregation of gradients, likewise in the order (steps, replicas of this
            process, aggregations, 2); None where the steps are not timed.
    """

    logs: Logs
    begins: Any = None
    intervals: Any = None


class StepFunctions:
    """The `tf.function`s of one model, traced once for each kind of batch.

    Args:
        step: the step.
        run_eagerly: run Python instead, for debugging.
        on_trace: is called whenever a function begins to be traced.
    """

    def __init__(self, step: Step, *, run_eagerly: bool = False, on_trace: "Callable[[], None]" = lambda: None):
        self.step = step
        self.run_eagerly = run_eagerly
        self._on_trace = on_trace
        self._cache: dict[tuple, Any] = {}
        self._bound_to: dict[tuple, tuple] = {}

    def train(self, iterator: Any, steps: int, layout: BatchLayout, *, with_logs: bool = True) -> TrainResult:
        """Trains `steps` steps on batches from `iterator`.

        Args:
            iterator: gives the batches.
            steps: how many.
            layout: what is known about the batches.
            with_logs: whether the logs after the last step are wanted, which takes an exchange.
        """
        if steps > 1 and not self.run_eagerly:
            build = lambda: lambda it, n: self._train_loop(it, n, layout, with_logs)  # noqa: E731
            function = self._function(("train", "loop", layout, with_logs), build)
            return TrainResult(*function(iterator, tf.constant(steps, tf.int32)))
        build = lambda: lambda it: self._train_next(it, layout, with_logs, after=())  # noqa: E731
        results = [self._bound(("train", layout, with_logs), build, iterator)(iterator) for _ in range(steps)]
        logs, begins, intervals = results[-1]
        if self.step.timed and steps > 1:
            begins, intervals = ([result[i] for result in results] for i in (1, 2))
        return TrainResult(logs, begins, intervals)

    def test(self, iterator: Any, steps: int, layout: BatchLayout) -> Logs:
        """Evaluates `steps` batches; metrics are read at the end, by `logs`.

        Returns:
            The logs of the last step, where the model has its own `test_step`; else None.
        """
        if steps > 1 and not self.run_eagerly:
            build = lambda: lambda it, n: self._test_loop(it, n, layout)  # noqa: E731
            return self._function(("test", "loop", layout), build)(iterator, tf.constant(steps, tf.int32))
        build = lambda: lambda it: self._test_next(it, layout)  # noqa: E731
        for _ in range(steps):
            logs = self._bound(("test", layout), build, iterator)(iterator)
        return logs

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all replicas since they were last reset."""
        return self._function(("logs",), lambda: self.step.logs)()

    def train_batch(self, batch: Any, layout: BatchLayout) -> TrainResult:
        """Trains on one per-replica batch `(data, count, total)`."""
        build = lambda: lambda batch: self.step.train(batch, layout, with_logs=True)  # noqa: E731
        logs, intervals = self._function(("train_batch", layout), build)(batch)
        return TrainResult(logs, intervals=intervals)

    def test_batch(self, batch: Any, layout: BatchLayout) -> dict[str, tf.Tensor]:
        """Evaluates one per-replica batch `(data, count, total)`; returns the logs."""
        build = lambda: lambda batch: self.step.test(batch, layout, with_logs=True)  # noqa: E731
        return self._function(("test_batch", layout), build)(batch)

    @property
    def trace_count(self) -> int:
        """Number of traces so far, over all functions."""
        return sum(f.experimental_get_tracing_count() for f in self._cache.values() if hasattr(f, "function_spec"))

    def _train_next(self, iterator: Any, layout: BatchLayout, with_logs: bool, *, after: Any) -> tuple:
        """Trains on the next batch, after the tensors `after`: logs, times of begin and input, intervals."""
        timed, marks = self.step.timed, self.step.marks
        if not timed and marks is None:
            return *self.step.train(self._next(iterator), layout, with_logs=with_logs), None
        begin = [stamp(after)] if timed else []
        begin += [marks.mark(READING, after)] if marks is not None else []
        with tf.control_dependencies([moment for moment in begin if moment is not None]):
            batch = next(iterator)
        there = [stamp(batch)] if timed else []
        there += [marks.mark(COMPUTING, batch)] if marks is not None else []
        batch = held(batch, there)
        logs, intervals = self.step.train(per_replica(self.step.strategy, batch), layout, with_logs=with_logs)
        return logs, (begin[0], there[0]) if timed else None, intervals

    def _train_loop(self, iterator: Any, steps: tf.Tensor, layout: BatchLayout, with_logs: bool) -> tuple:
        """A while loop for all steps but the last, which gives the logs."""
        timed = self.step.timed
        times = tuple(tf.TensorArray(tf.float64, steps) for _ in range(2)) if timed else ()

        def body(i: tf.Tensor, *times: tf.TensorArray) -> tuple:
            _, *values = self._train_next(iterator, layout, with_logs=False, after=i)
            values = values if timed else []
            return i + 1, *(array.write(i, tf.stack(value)) for array, value in zip(times, values, strict=False))

        i, *times = tf.while_loop(lambda i, *_: i < steps - 1, body, (tf.constant(0), *times), parallel_iterations=1)
        logs, *values = self._train_next(iterator, layout, with_logs, after=i)
        if not timed:
            return logs, None, None
        return logs, *(array.write(i, tf.stack(value)).stack() for array, value in zip(times, values, strict=True))

    def _test_next(self, iterator: Any, layout: BatchLayout) -> Logs:
        return self.step.test(self._next(iterator), layout, with_logs=False)

    def _test_loop(self, iterator: Any, steps: tf.Tensor, layout: BatchLayout) -> Logs:
        def body(i: tf.Tensor) -> tuple[tf.Tensor]:
            self._test_next(iterator, layout)
            return (i + 1,)

        tf.while_loop(lambda i: i < steps - 1, body, (tf.constant(0),), parallel_iterations=1)
        return self._test_next(iterator, layout)

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

            def traced(*arguments: Any) -> Any:
                self._on_trace()
                return function(*arguments)

            self._cache[key] = (
                function if self.run_eagerly else tf.function(traced, reduce_retracing=True, autograph=False)
            )
        return self._cache[key]
