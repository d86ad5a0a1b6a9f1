"""One model's training, evaluation and prediction: what `prepare` and `TrainLoop` share."""

import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import data as tfdist_data
from tfdist.cluster.base import missing_share
from tfdist.errors import EXIT_REQUEUE, PeerError, SaveError, UsageError
from tfdist.liveness.pulse import say
from tfdist.liveness.signals import StopSignals, no_requeue
from tfdist.liveness.stops import Preempted
from tfdist.strategy import is_chief, leave_together, num_workers, pulse_of
from tfdist.training import seams
from tfdist.training.build import build_model
from tfdist.training.functions import StepFunctions
from tfdist.training.marks import Marks
from tfdist.training.options import BatchLayout, StepOptions
from tfdist.training.report import Activity, StepListener, StepReport, Watcher
from tfdist.training.step import Step
from tfdist.training.workers import broadcast_int, gathered, require_equal
from tfdist.transport import check_transport, make_transport


class Runner:
    """Runs a compiled model's steps under the strategy that it was made under.

    Args:
        model: a Keras model.
        options: how to train.
        listener: is told of every call into the compiled loop.
    """

    def __init__(self, model: keras.Model, options: StepOptions, listener: "StepListener | None" = None):
        self.model = model
        self.options = _for_fewer_workers(options, model)
        self.listener = listener
        self.strategy = model.distribute_strategy
        check_transport(options.transport, self.strategy)
        self.chief = is_chief(self.strategy)
        self.num_workers = num_workers(self.strategy)
        self.steps_done = 0
        self.last_step: int | None = None
        self.position: tfdist_data.Position | None = None
        self.resumed_at: tfdist_data.Position | None = None
        self.pulse = pulse_of(self.strategy)
        self._marks = Marks() if self.pulse.has_monitor else None
        self._save_on_stop: Callable[[], None] | None = None
        self._evaluation_due = False
        self.evaluating = False
        self._first_call = True
        self._run = contextlib.ExitStack()
        self._watchers: list[Watcher] = []
        self._at_stop: list[Callable[[], None]] = []
        self._timed = False
        self._functions: StepFunctions | None = None
        self._compiled_as: Any = None
        self._hook_built = False
        self._agreed: weakref.WeakKeyDictionary[tfdist_data.Feed, int | None] = weakref.WeakKeyDictionary()

    def functions(self, spec: Any) -> StepFunctions:
        """Returns the compiled loops, after building what the model still lacks.

        Args:
            spec: `tf.TypeSpec`s of a batch.
        """
        model = self.model
        key = seams.compiled_as(model)
        if self._functions is None or key != self._compiled_as:
            build_model(model, spec, self.strategy)
            if not self._hook_built:
                with self.strategy.scope():
                    self.options.hook.build(model.trainable_variables)
                self._connect_hook()
                self._hook_built = True
            self._make_functions()
            self._compiled_as = seams.compiled_as(model)
        return self._functions

    def _make_functions(self) -> None:
        step = Step(self.model, self.strategy, self.options, timed=self._timed, marks=self._marks)
        self._functions = StepFunctions(step, run_eagerly=bool(self.model.run_eagerly), on_trace=self._on_trace)

    def _on_trace(self) -> None:
        if self._marks is not None and self.pulse.doing in ("step", "first"):
            self._marks.reset()
            self.pulse.enter("trace")

    def watch(self, watcher: Watcher, *, at_stop: "Callable[[], None]" = lambda: None) -> None:
        """Tells `watcher` of all that follows; from now on steps take time stamps.

        Args:
            watcher: see `Watcher`.
            at_stop: is called, on every worker, where the job is asked to stop, after the last save.
        """
        self._watchers.append(watcher)
        self._at_stop.append(at_stop)
        if not self._timed:
            self._timed = True
            if self._functions is not None:
                self._make_functions()

    def unwatch(self, watcher: Watcher) -> None:
        """Ends what `watch` began; the step stays as it was traced."""
        self._watchers.remove(watcher)

    @contextlib.contextmanager
    def same_watchers_after(self) -> Iterator[None]:
        """Leaves the watchers as they were, whatever happens within."""
        watchers = list(self._watchers)
        try:
            yield
        finally:
            self._watchers[:] = watchers

    @contextlib.contextmanager
    def activity(self, kind: str) -> Iterator[None]:
        """Tells the watchers of what is done within."""
        began = time.time()
        before, self.evaluating = self.evaluating, kind == "evaluation"
        with self.pulse.phase(kind):
            yield
        self.evaluating = before
        for watcher in self._watchers:
            watcher(Activity(kind, time.time() - began))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Is what one call that trains does in: watched, and ended in order where the job is asked to stop."""
        if self._marks is not None:
            self.pulse.stage_from(self._marks.read)
        self.pulse.enter("start")
        try:
            with self.same_watchers_after(), contextlib.ExitStack() as self._run:
                try:
                    yield
                except Preempted:
                    if self._save_on_stop is not None:
                        with self.pulse.phase("save"):
                            self._save_on_stop()
                    for finish in self._at_stop:
                        finish()
                    say(f"stopped after step {self.steps_done}, to be started again (exit code {EXIT_REQUEUE})")
                    raise
        except Preempted:
            self.pulse.forget_stop()
            leave_together(self.strategy)
            raise
        except SystemExit as error:
            if error.code == EXIT_REQUEUE:  # a signal that came before anything could be saved
                self.pulse.request_stop("a signal")
                self.pulse.close()
            else:
                self.pulse.failed(f"it left by sys.exit({error.code!r})", by_others=False)
            raise
        except BaseException as error:
            by_others = self.num_workers > 1 and isinstance(error, _BY_OTHERS)
            for_good = isinstance(error, UsageError | SaveError)
            self.pulse.failed(f"{type(error).__name__}: {error}", by_others=by_others, for_good=for_good)
            if by_others and not isinstance(error, PeerError):
                raise PeerError(self.pulse.what_happened() or _A_COLLECTIVE_FAILED.format(error=error)) from error
            raise
        finally:
            self._save_on_stop, self.pulse.saves, self.evaluating = None, False, False
            self._at_stop.clear()
            self.pulse.enter("outside")

    def save_on_stop(self, save: "Callable[[], None]") -> None:
        """Lets a signal that asks the job to stop (SIGTERM) end this call after a step, with `save` as the last.

        To be called within a call that trains. Without it, such a signal ends the process, as there is nothing
        that could be gone on from.

        Args:
            save: is called on every worker, after the same step.
        """
        self._save_on_stop, self.pulse.saves = save, True
        self._run.enter_context(StopSignals(self.pulse))

    def _connect_hook(self) -> None:
        def agree(value: int) -> int:
            return broadcast_int(self.strategy, value)

        hook = self.options.hook
        hook.transport = make_transport(self.options.transport, self.strategy, agree)
        hook.tune(self.strategy, agree)

    def begin_epoch(self, feed: "tfdist_data.Feed", epoch: int, step: int) -> tuple[Any, "int | None"]:
        """Begins an epoch of the training data at a step; see `Feed.begin_epoch`."""
        self._first_call = True  # to fill a buffer for shuffling may take long
        return feed.begin_epoch(self.strategy, epoch, step)

    def resume(self, step: int, position: "tfdist_data.Position", *, evaluation_due: bool = False) -> None:
        """Makes the next training go on at `position`, after `step` steps, and perhaps with an evaluation."""
        self.steps_done = step
        self._evaluation_due = evaluation_due
        self.pulse.resumed(step)
        self.position = self.resumed_at = position

    def take_evaluation_due(self) -> bool:
        """Returns, once, whether an evaluation was broken off where training goes on."""
        due, self._evaluation_due = self._evaluation_due, False
        return due

    def take_resumed(self, feed: "tfdist_data.Feed") -> "tfdist_data.Position | None":
        """Returns where a resumed training goes on, once, and gives `feed` its seed; else None."""
        position, self.resumed_at = self.resumed_at, None
        if position is not None:
            feed.seed = position.seed
        return position

    def feed(self, source: Any, **options: Any) -> "tfdist_data.Feed":
        """Returns `source` cut into the batches of this process's replicas."""
        return tfdist_data.make_feed(source, self.strategy, **options)

    def train_calls(
        self,
        feed: "tfdist_data.Feed",
        iterator: Any,
        *,
        position: "tfdist_data.Position",
        steps: "int | None",
        steps_per_call: int = 1,
        before: "Callable[[int], None]",
    ) -> Iterator[tuple[int, dict]]:
        """Trains call by call.

        Args:
            feed: where the batches come from.
            iterator: an iterator of `feed`.
            position: where in the data `iterator` begins.
            steps: steps from there to the end of the epoch, or None to go on until the data ends.
            steps_per_call: steps in one call of the compiled loop.
            before: is called with the first step of each call before it.

        Yields:
            The last step of each call, counted from the beginning of the epoch, and its logs. `self.position` then
            says where the data goes on.
        """
        step = 0
        while steps is None or step < steps:
            most = steps_per_call if steps is None else min(steps_per_call, steps - step)
            if self.last_step is not None:
                most = min(most, self.last_step - self.steps_done)
            done, logs = self.train_call(
                feed, iterator, most, with_logs=True, before=lambda first=position.step + step: before(first)
            )
            if not done:
                return
            step += done
            reached = position.advance(step)
            self.position = reached.next_epoch() if step == steps else reached
            yield reached.step - 1, logs

    def train_call(
        self,
        feed: "tfdist_data.Feed",
        iterator: Any,
        most: int,
        *,
        with_logs: bool,
        before: "Callable[[], None] | None" = None,
    ) -> tuple[int, "dict | None"]:
        """One call of the compiled loop, which `functions` has made.

        Args:
            feed: where the batches come from.
            iterator: an iterator of `feed`.
            most: steps to train; fewer where the data ends.
            with_logs: whether logs are wanted.
            before: is called when it is known that there is a batch.

        Returns:
            The steps done, 0 at the end of the data, and the logs, if any.
        """
        functions, pulse = self._functions, self.pulse
        layout = layout_of(feed)
        batch = input_there = None
        fetching = time.time()
        if self._first_call and self._save_on_stop is None:
            no_requeue()
        pulse.stops.begin()
        if feed.may_end:
            # Only the batch itself tells whether the data has ended, so batches are fetched one by one.
            with pulse.phase("first" if self._first_call else "data"):
                batch, most = self.next_batch(iterator), 1
            if batch is None:
                pulse.stops.end()
                return 0, None
            input_there = time.time()
        if before is not None:
            before()
        traces = functions.trace_count if self._watchers else 0
        began, start = time.time(), time.perf_counter()
        pulse.enter("first" if self._first_call else "step")
        self._first_call = False
        if batch is not None:
            result = functions.train_batch(batch, layout)
        else:
            result = functions.train(iterator, most, layout, with_logs=with_logs)
        seconds = time.perf_counter() - start
        self.steps_done += most
        pulse.stepped(self.steps_done, seconds / most)
        pulse.stops.end()
        report = StepReport(
            step=self.steps_done,
            num_steps=most,
            seconds=seconds,
            examples=feed.batch_size * most if feed.batch_size else None,
            began=began if batch is None else fetching,
            ended=time.time(),
            input_there=input_there,
            begins=result.begins,
            intervals=result.intervals,
            traced=bool(self._watchers) and functions.trace_count > traces,
        )
        for listener in [*([self.listener] if self.listener else []), *self._watchers]:
            listener(report)
        return most, result.logs

    def test_calls(
        self,
        feed: "tfdist_data.Feed",
        *,
        steps: "int | None",
        steps_per_call: int = 1,
        before: "Callable[[int], None]",
    ) -> Iterator[tuple[int, "dict | None"]]:
        """Evaluates call by call; see `train_calls`. The metrics are read by `functions(...).logs()` at the end."""
        functions = self.functions(feed.element_spec)
        layout = layout_of(feed)
        feed.restart()
        iterator, own_steps = feed.begin_epoch(self.strategy, 0)
        steps = steps or own_steps
        step = 0
        while steps is None or step < steps:
            self.pulse.stops.begin()
            if feed.may_end:
                batch = self.next_batch(iterator)
                if batch is None:
                    self.pulse.stops.end()
                    break
                before(step)
                count = 1
                logs = functions.test_batch(batch, layout)
            else:
                count = min(steps_per_call, steps - step)
                before(step)
                logs = functions.test(iterator, count, layout)
            self.pulse.moved()
            self.pulse.stops.end()
            yield step + count - 1, logs
            step += count
        feed.end_epoch(step)

    def agreed_steps(self, feed: "tfdist_data.Feed") -> "int | None":
        """Checks before the first step that the workers' data fit together. Every worker must call it.

        Returns:
            The steps of an epoch where each worker has its own part of the data; else None, as workers that read
            the same data end together by themselves.

        Raises:
            UsageError: on every worker, where the data differ between them.
        """
        if self.num_workers == 1:
            return None
        if feed not in self._agreed:
            self._agreed[feed] = self._agree(feed)
        return self._agreed[feed]

    def _agree(self, feed: "tfdist_data.Feed") -> "int | None":
        if not feed.presharded:
            for value, what in (
                (feed.steps_per_epoch or -1, "the number of batches of an epoch"),
                (feed.num_examples or -1, "the number of examples"),
                (feed.early_fingerprint(), "the data"),
            ):
                require_equal(self.strategy, value, what, _SAME_DATA)
            return None
        known = gathered(self.strategy, feed.steps_per_epoch or -1)
        if min(known) < 0:
            raise UsageError(
                "the dataset is sharded by its owner (auto_shard_policy OFF) and its length is not known on all "
                "workers, so they cannot agree on the number of steps; give steps_per_epoch, or "
                "dataset.apply(tf.data.experimental.assert_cardinality(n))"
            )
        return max(known)

    def require_same_batch(self, feed: "tfdist_data.Feed") -> None:
        """Compares the first batch of a user's own pipeline between the workers, once it was read."""
        if self.num_workers == 1 or feed.presharded:
            return
        fingerprint = feed.fingerprint()
        if fingerprint is not None:
            require_equal(self.strategy, fingerprint, "the first global batch", _SAME_DATA)

    def next_batch(self, iterator: Any) -> Any:
        """Returns the next per-replica batch, or None at the end of the data."""
        batch = tfdist_data.per_replica(self.strategy, next(iterator))
        total = self.strategy.experimental_local_results(batch[2])[0]
        return None if int(total) == 0 else batch

    def split_batch(self, data: Any) -> tuple[Any, Any]:
        """Cuts one global batch that every worker holds.

        Args:
            data: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The per-replica `(data, count, total)`, and the specs of `data`.
        """
        data = keras.tree.map_structure(_as_tensor, data)
        layout = tfdist_data.Layout.of(self.strategy)
        rows = int(tfdist_data.num_rows(data))
        if rows == 0:
            raise UsageError("the batch has no rows")

        def value(context: Any) -> Any:
            start, size = (int(v) for v in layout.rows(rows, int(context.replica_id_in_sync_group)))
            part = tfdist_data.slice_rows(data, start, size) if size else tfdist_data.slice_rows(data, 0, 1)
            return part, tf.constant(size, tf.int32), tf.constant(rows, tf.int32)

        spec = tf.nest.map_structure(_batch_spec, data)
        if self.strategy.num_replicas_in_sync == 1:
            return value(tf.distribute.experimental.ValueContext(0, 1)), spec
        return self.strategy.experimental_distribute_values_from_function(value), spec


def _for_fewer_workers(options: StepOptions, model: keras.Model) -> StepOptions:
    """Cuts batches into more micro-batches where workers are missing, so that the rest have memory enough."""
    times = missing_share(num_workers(model.distribute_strategy))
    if times == 1 or seams.has_own_train_step(model):
        return options
    return dataclasses.replace(options, accumulate_steps=times * options.accumulate_steps)


def runner_of(model: keras.Model, who: str) -> Runner:
    """Returns the runner that `tfdist.prepare` has given `model`.

    Raises:
        UsageError: the model is not prepared; it names `who` needs it.
    """
    runner = getattr(getattr(model.fit, "__self__", None), "runner", None)
    if runner is None:
        raise UsageError(f"{who} needs a model that tfdist.prepare has prepared")
    return runner


def one_run(attribute: str) -> Callable:
    """Decorates a method that trains: see `Runner.training`.

    Args:
        attribute: where the object of the method has its runner.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **options: Any) -> Any:
            with getattr(self, attribute).training():
                return method(self, *args, **options)

        return run

    return decorate


_BY_OTHERS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    PeerError,
)
"""What a worker's step raises when another worker has gone."""
_A_COLLECTIVE_FAILED = "a step of this worker failed, as TensorFlow does when another worker has gone: {error}"

_SAME_DATA = (
    "give every worker the same, whole data and tfdist gives each its part: seed every shuffle "
    "(dataset.shuffle(n, seed=...)), or give a tf.data.Dataset with auto_shard_policy OFF where each worker reads its "
    "own part"
)


def layout_of(feed: "tfdist_data.Feed | None") -> BatchLayout:
    """Returns what the step may rely on about the batches of `feed` (None: nothing)."""
    if feed is None:
        return BatchLayout()
    return BatchLayout(full_batches=feed.full_batches, presharded=feed.presharded)


def as_python(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns `logs` with Python numbers; a metric with several results gives several logs."""
    result: dict[str, Any] = {}
    for key in sorted(logs):
        value = logs[key]
        if isinstance(value, dict):
            result.update(as_python(value))
            continue
        try:
            result[key] = float(value)
        except (TypeError, ValueError):
            result[key] = value
    return result


def _as_tensor(value: Any) -> Any:
    if value is None or isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        value = value.astype(keras.config.floatx())
    return tf.convert_to_tensor(value)


def _batch_spec(value: Any) -> tf.TypeSpec:
    if not isinstance(value, tf.Tensor):
        return tf.type_spec_from_value(value)
    return tf.TensorSpec([None, *value.shape[1:]] if value.shape.rank else [], value.dtype)
