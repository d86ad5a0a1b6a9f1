"""`TrainLoop`: the custom loop. Many steps in one `tf.function` call, on the same step as `fit`."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist import data as tfdist_data
from tfdist import hooks
from tfdist.errors import UsageError
from tfdist.training.checkpoint import Checkpoints
from tfdist.training.options import StepOptions
from tfdist.training.report import StepListener
from tfdist.training.runner import Runner, as_python, one_run
from tfdist.training.workers import any_of
from tfdist.transport import Transport

_NEVER = 2**62


@dataclasses.dataclass(frozen=True)
class LoopState:
    """What a callback of `TrainLoop.run` is told.

    Attributes:
        step: training steps done, over all runs and restarts.
        epoch: epoch of the data, from 0.
        logs: loss and metrics over the steps since the last call, over all replicas.
        validation: results of an evaluation that happened at this step, else empty.
    """

    step: int
    epoch: int
    logs: dict[str, float]
    validation: dict[str, float]


LoopCallback = Callable[[LoopState], "bool | None"]
"""Called on every worker; returning True ends the run, on all workers, after the step at hand."""


@typing.runtime_checkable
class LoopObserver(typing.Protocol):
    """What watches a run without taking part in it, such as `tfdist.ScalingCallback`."""

    def on_loop_begin(self, runner: Runner) -> None:
        """Is called on every worker before the first step."""

    def on_loop_end(self) -> None:
        """Is called on every worker after the last step."""


class TrainLoop:
    """Trains a model step by step, without Keras's `fit`.

    The model is compiled with the given loss, optimizer and metrics, and its step is the one that `fit` uses
    after `prepare`, so both give the same numbers.

    Args:
        model: a Keras model made inside `with strategy.scope():`.
        loss: a Keras loss or its name, or a function `(y_true, y_pred)` that returns per-example values, a
            scalar mean, or a pair (sum, count) for an exact mean over, say, tokens.
        optimizer: a Keras optimizer or its name. One that is not built yet is made anew inside the strategy's scope;
            find it at `model.optimizer`.
        metrics: Keras metrics or their names.
        hook: see `tfdist.prepare`.
        transport: see `tfdist.prepare`.
        accumulate_steps: see `tfdist.prepare`.
        clip_global_norm: see `tfdist.prepare`.
        jit_compile: compile forward and backward pass with XLA.
        steps_per_loop: most steps in one call of the compiled loop.
        step_listener: is called with a `StepReport` after each call.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        loss: Any,
        optimizer: Any,
        metrics: Sequence = (),
        hook: "str | hooks.Hook | None" = None,
        transport: "str | Transport" = "auto",
        accumulate_steps: int = 1,
        clip_global_norm: "float | None" = None,
        jit_compile: bool = False,
        steps_per_loop: int = 1,
        step_listener: "StepListener | None" = None,
    ):
        if not isinstance(model, keras.Model):
            raise UsageError(f"TrainLoop: {type(model).__name__} is no keras.Model")
        if isinstance(steps_per_loop, bool) or not isinstance(steps_per_loop, int) or steps_per_loop < 1:
            raise UsageError(f"steps_per_loop={steps_per_loop!r}: an integer of at least 1 is needed")
        options = StepOptions(
            hook=hooks.parse(hook),
            transport=transport,
            accumulate_steps=accumulate_steps,
            clip_global_norm=clip_global_norm,
            jit_compile=jit_compile,
        )
        self.model = model
        self.steps_per_loop = steps_per_loop
        with model.distribute_strategy.scope():
            if isinstance(optimizer, keras.Optimizer) and not optimizer.built:
                # An optimizer has variables from the start; made outside of the scope they would be no replica's.
                optimizer = type(optimizer).from_config(optimizer.get_config())
            model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics), jit_compile=False)
        self._runner = Runner(model, options, step_listener)
        self._feeds: dict[int, tuple[Any, tfdist_data.Feed]] = {}
        self.step = 0
        self._position: tfdist_data.Position | None = None

    @property
    def strategy(self) -> Any:
        """The strategy that the model was made under."""
        return self._runner.strategy

    @property
    def position(self) -> "tfdist_data.Position":
        """Where in the training data the next step is."""
        return self._position or tfdist_data.Position()

    @property
    def hook(self) -> hooks.Hook:
        """The hook that aggregates the gradients."""
        return self._runner.options.hook

    def build(self, dataset: Any) -> None:
        """Creates all variables for batches such as `dataset` gives; needed before a checkpoint is restored."""
        self._runner.functions(self._feed(dataset).element_spec)

    def checkpoints(self, directory: Any, **options: Any) -> Checkpoints:
        """Returns the checkpoints of this training in `directory`; call `build` first.

        Args:
            directory: where they are.
            **options: see `Checkpoints`.
        """
        return Checkpoints(directory, self.model, self.strategy, hook=self.hook, **options)

    def resume(self, checkpoints: Checkpoints, resume: str = "auto") -> bool:
        """Continues from the newest checkpoint; see `Checkpoints.restore`. Returns whether there was one."""
        saved = checkpoints.restore(resume)
        if saved is None:
            return False
        self.step, self._position = saved.step, saved.position
        self._runner.resume(saved.step, saved.position, evaluation_due=saved.evaluation_due)
        return True

    @one_run("_runner")
    def run(
        self,
        dataset: Any,
        *,
        steps: int,
        validation: Any = None,
        validate_every: "int | None" = None,
        checkpoints: "Checkpoints | None" = None,
        checkpoint_every: "int | None" = None,
        callbacks: "Sequence[LoopCallback | LoopObserver]" = (),
    ) -> dict[str, float]:
        """Trains for `steps` steps, beginning new epochs of the data as often as needed.

        Args:
            dataset: batches, as `tfdist.data` sources, a `tf.data.Dataset` of global batches, or arrays `(x, y)`.
            steps: steps to train, counted from now.
            validation: data to evaluate on.
            validate_every: steps between evaluations; None evaluates at the end only.
            checkpoints: where to save; see `checkpoints`.
            checkpoint_every: steps between checkpoints; None saves at the end only.
            callbacks: called after each call of the compiled loop; observers are told of begin and end.

        Returns:
            Loss and metrics over the steps since the last evaluation, or with callbacks since the last call, else of
            the whole run; and those of the last evaluation with the prefix `val_`.
        """
        for name, value in (
            ("steps", steps),
            ("validate_every", validate_every),
            ("checkpoint_every", checkpoint_every),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: an integer of at least 1 is needed")
        observers = [callback for callback in callbacks if isinstance(callback, LoopObserver)]
        callbacks = [callback for callback in callbacks if not isinstance(callback, LoopObserver)]
        feed = self._feed(dataset)
        self._runner.functions(feed.element_spec)
        for observer in observers:
            observer.on_loop_begin(self._runner)
        if self._position is None:
            self._position = tfdist_data.Position(seed=feed.seed)
        feed.seed = self._position.seed
        agreed = self._runner.agreed_steps(feed)
        is_first = True
        last = self.step + steps
        logs: dict[str, float] = {}
        validation_logs: dict[str, float] = {}
        stop = epoch_is_over = False
        saved_at = self.step

        def save_last() -> None:
            due = self._runner.evaluating
            if self.step > saved_at or due:
                checkpoints.save(self.step, self._next_position(epoch_is_over), evaluation_due=due)
            checkpoints.wait()
            checkpoints.check()

        if checkpoints is not None:
            checkpoints.prepare()
            self._runner.save_on_stop(save_last)
        if self._runner.take_evaluation_due() and validation is not None:
            validation_logs = self._validate(validation)
        self.model.reset_metrics()
        while self.step < last and not stop:
            iterator, left = self._runner.begin_epoch(feed, self.position.epoch, self.position.step)
            left = left if agreed is None else agreed - self.position.step
            epoch_is_over = left == 0
            while self.step < last and not stop and not epoch_is_over:
                most = min(
                    self.steps_per_loop,
                    last - self.step,
                    left if left is not None else 1,
                    _until_next(self.step, validate_every),
                    _until_next(self.step, checkpoint_every),
                )
                done, call_logs = self._runner.train_call(feed, iterator, most, with_logs=bool(callbacks))
                if not done:
                    if self.position.step == 0:
                        raise UsageError("TrainLoop.run: the data gave no batch; check the dataset")
                    epoch_is_over = True
                    break
                if is_first:
                    self._runner.require_same_batch(feed)
                    is_first = False
                self.step += done
                self._position = self.position.advance(done)
                left = None if left is None else left - done
                epoch_is_over = left == 0
                if call_logs is not None:
                    logs = as_python(call_logs)
                if callbacks:
                    self.model.reset_metrics()
                validation_now: dict[str, float] = {}
                if validation is not None and _is_due(self.step, validate_every, last):
                    if call_logs is None:
                        logs = as_python(self._runner.functions(feed.element_spec).logs())
                    validation_now = validation_logs = self._validate(validation)
                if checkpoints is not None:
                    checkpoints.check()
                if checkpoints is not None and _is_due(self.step, checkpoint_every, last):
                    with self._runner.activity("save"):
                        checkpoints.save(self.step, self._next_position(epoch_is_over), wait=self.step == last)
                    saved_at = self.step
                if callbacks:
                    state = LoopState(self.step, self.position.epoch, logs, validation_now)
                    wishes = [callback(state) for callback in callbacks]
                    with self._runner.activity("agreement"):
                        stop = any_of(self.strategy, any(wish is True for wish in wishes))
            feed.end_epoch(self.position.step)
            if epoch_is_over:
                self._position, epoch_is_over = self.position.next_epoch(), False
        if stop and checkpoints is not None:
            with self._runner.activity("save"):
                save_last()
        if not logs:
            logs = as_python(self._runner.functions(feed.element_spec).logs())
        for observer in observers:
            observer.on_loop_end()
        return {**logs, **{f"val_{name}": value for name, value in validation_logs.items()}}

    def _validate(self, validation: Any) -> dict[str, float]:
        with self._runner.activity("evaluation"):
            logs = self.evaluate(validation)
        self.model.reset_metrics()
        return logs

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Returns loss and metrics over `dataset`, each example counted once. Every worker must call it."""
        feed = self._feed(dataset)
        functions = self._runner.functions(feed.element_spec)
        self.model.reset_metrics()
        calls = list(
            self._runner.test_calls(
                feed,
                steps=self._runner.agreed_steps(feed),
                steps_per_call=self.steps_per_loop,
                before=lambda step: None,
            )
        )
        if not calls:
            raise UsageError("TrainLoop.evaluate: the data gave no batch; check the dataset")
        self._runner.require_same_batch(feed)
        own_logs = calls[-1][1]
        return as_python(functions.logs() if own_logs is None else own_logs)

    def _next_position(self, epoch_is_over: bool) -> "tfdist_data.Position":
        return self.position.next_epoch() if epoch_is_over else self.position

    def _feed(self, dataset: Any) -> "tfdist_data.Feed":
        known = self._feeds.get(id(dataset))
        if known is None or known[0] is not dataset:
            known = (dataset, self._runner.feed(tfdist_data.as_source(dataset)))
            self._feeds[id(dataset)] = known
        return known[1]


def _until_next(step: int, every: "int | None") -> int:
    return _NEVER if every is None else every - step % every


def _is_due(step: int, every: "int | None", last: int) -> bool:
    return step == last or (every is not None and step % every == 0)
