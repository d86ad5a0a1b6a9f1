"""`prepare`: Keras's own training methods, made right and fast for every strategy, on one model instance."""

from typing import Any

import keras
import tensorflow as tf

from tfdist import data as tfdist_data
from tfdist import hooks
from tfdist.data import Position
from tfdist.errors import UsageError
from tfdist.strategy import distributed_strategies
from tfdist.training import seams
from tfdist.training.callbacks import callback_list, may_stop_alone, restores
from tfdist.training.options import StepOptions
from tfdist.training.predict import Predictor
from tfdist.training.report import StepListener
from tfdist.training.runner import Runner, as_python, layout_of, one_run
from tfdist.training.workers import any_of, broadcast_from_chief, broadcast_int
from tfdist.transport import Transport

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def prepare(
    model: keras.Model,
    *,
    hook: "str | hooks.Hook | None" = None,
    transport: "str | Transport" = "auto",
    accumulate_steps: int = 1,
    clip_global_norm: "float | None" = None,
    jit_compile: "bool | None" = None,
    step_listener: "StepListener | None" = None,
) -> keras.Model:
    """Makes `fit` and its siblings of this model give the numbers of one device under its strategy.

    Replaces `fit`, `evaluate`, `predict`, `train_on_batch`, `test_on_batch` and `predict_on_batch` on the instance.
    Keras itself and other models are not touched; saving and loading work as before. Batches are global: with
    `batch_size=128` and 4 replicas, each replica gets 32 examples. In a job of several workers each of them calls
    the same methods with the same data. Prepare a model again to change the options.

    Args:
        model: a Keras model, made and compiled inside `with strategy.scope():`.
        hook: how gradients are aggregated: a spec such as "allreduce:bucket_mb=4", a `tfdist.hooks.Hook`, or None
            for the exact all-reduce.
        transport: what moves the gradients: "collective" (TensorFlow's), "mpi", "auto" (MPI where the workers run
            under it and it is not slower, which is measured; else the collectives), or a
            `tfdist.transport.Transport`.
        accumulate_steps: micro-batches that each replica's batch is cut into; memory for one of them is needed.
        clip_global_norm: largest norm of the aggregated gradients.
        jit_compile: compile forward and backward pass with XLA; None takes what `model.compile` was given.
        step_listener: is called with a `StepReport` after each call into the compiled loop.

    Returns:
        The same model.

    Raises:
        UsageError: not a Keras model, bad options, or a model that was built outside of its strategy's scope.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(f"prepare: {type(model).__name__} is no keras.Model")
    own = model.distribute_strategy
    if tf.distribute.has_strategy():
        wanted = [tf.distribute.get_strategy()]
    else:
        # A model made without any strategy next to one for several replicas was meant for that one.
        wanted = distributed_strategies() if type(own) is type(tf.distribute.get_strategy()) else []
    if wanted and own not in wanted:
        raise UsageError(
            f"prepare: model {model.name!r} was built outside of the scope of {type(wanted[0]).__name__} (or under "
            "another strategy); build and compile it inside `with strategy.scope():`"
        )
    if jit_compile is None:
        jit_compile = bool(model.compiled and model.jit_compile)
    options = StepOptions(
        hook=hooks.parse(hook),
        transport=transport,
        accumulate_steps=accumulate_steps,
        clip_global_norm=clip_global_norm,
        jit_compile=jit_compile,
    )
    if model.built:
        from tfdist.training.build import require_scope

        require_scope(model, model.distribute_strategy)
    methods = KerasMethods(Runner(model, options, step_listener))
    for name in METHODS:
        object.__setattr__(model, name, getattr(methods, name))
    return model


class KerasMethods:
    """The methods that `prepare` puts on a model; signatures and results are those of `keras.Model`.

    Args:
        runner: runs the model's steps.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.model = runner.model
        self._predictor = Predictor(runner)
        self._fits = 0

    @one_run("runner")
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: "int | None" = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: "dict | None" = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: "int | None" = None,
        validation_steps: "int | None" = None,
        validation_batch_size: "int | None" = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Trains the model; see `keras.Model.fit`."""
        model, runner = self.model, self.runner
        seams.assert_compiled(model, "fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = tfdist_data.split_validation(x, y, sample_weight, validation_split)
        source = tfdist_data.from_keras(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            steps=steps_per_epoch,
        )
        feed = runner.feed(source, seed_offset=self._fits)
        self._fits += 1
        runner.functions(feed.element_spec)
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = tfdist_data.unpack_validation(validation_data)
            validation = runner.feed(
                tfdist_data.from_keras(
                    val_x,
                    val_y,
                    val_weight,
                    batch_size=validation_batch_size or batch_size,
                    shuffle=False,
                    steps=validation_steps,
                )
            )
        agreed = runner.agreed_steps(feed)
        user_callbacks = callbacks
        callbacks = callback_list(
            callbacks,
            model,
            chief=runner.chief,
            history=True,
            verbose=_verbosity(verbose),
            epochs=epochs,
            steps=agreed or feed.steps_per_epoch,
        )
        model.stop_training = False
        stops_alone = runner.num_workers > 1 and may_stop_alone(user_callbacks)
        callbacks.on_train_begin()
        self._follow_restored_chief(user_callbacks)
        epoch_logs: dict[str, Any] = {}
        start = runner.take_resumed(feed) or Position(seams.initial_epoch(model) or initial_epoch, 0, feed.seed)
        checked = False
        if runner.take_evaluation_due() and validation is not None and start.epoch > 0:
            epoch_logs = self._validated(validation, callbacks)
            callbacks.on_epoch_end(start.epoch - 1, epoch_logs)
        for epoch in range(start.epoch, epochs):
            if runner.last_step is not None and runner.steps_done >= runner.last_step:
                break
            position = start if epoch == start.epoch else Position(epoch, 0, feed.seed)
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs: dict[str, Any] = {}
            done = 0
            iterator, steps = runner.begin_epoch(feed, epoch, position.step)
            calls = runner.train_calls(
                feed,
                iterator,
                position=position,
                steps=agreed or steps,
                steps_per_call=model.steps_per_execution,
                before=callbacks.on_train_batch_begin,
            )
            for last_step, logs in calls:
                if not checked:
                    runner.require_same_batch(feed)
                    checked = True
                callbacks.on_train_batch_end(last_step, logs)
                done = last_step + 1 - position.step
                if stops_alone:
                    with runner.activity("agreement"):
                        model.stop_training = any_of(runner.strategy, model.stop_training)
                if model.stop_training:
                    break
            feed.end_epoch(done)
            if not done:
                raise UsageError(_NO_BATCH.format(what="fit", argument="steps_per_epoch"))
            epoch_logs = as_python(logs)
            if validation is not None and _is_validation_epoch(epoch, validation_freq):
                epoch_logs.update(self._validated(validation, callbacks))
            callbacks.on_epoch_end(epoch, epoch_logs)
            model.stop_training = any_of(runner.strategy, model.stop_training)
            if model.stop_training:
                break
        if isinstance(model.optimizer, keras.Optimizer) and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=epoch_logs)
        return model.history

    def _validated(self, validation: "tfdist_data.Feed", callbacks: Any) -> dict[str, Any]:
        with self.runner.activity("evaluation"):
            values = self._evaluate(validation, callbacks)
        return {f"val_{name}": value for name, value in values.items()}

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: "int | None" = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: "int | None" = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Returns loss and metrics over the data, each example counted once; see `keras.Model.evaluate`."""
        seams.assert_compiled(self.model, "evaluate")
        source = tfdist_data.from_keras(x, y, sample_weight, batch_size=batch_size, shuffle=False, steps=steps)
        feed = self.runner.feed(source)
        self.runner.functions(feed.element_spec)
        callbacks = callback_list(
            callbacks,
            self.model,
            chief=self.runner.chief,
            history=False,
            verbose=_verbosity(verbose),
            epochs=1,
            steps=feed.steps_per_epoch,
        )
        logs = self._evaluate(feed, callbacks)
        return logs if return_dict else seams.flatten_logs(self.model, logs)

    def predict(
        self,
        x: Any,
        batch_size: "int | None" = None,
        verbose: Any = "auto",
        steps: "int | None" = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs of all rows, in order, on every worker; see `keras.Model.predict`.

        A worker predicts alone, with its own replicas: it may be called on the chief only.
        """
        callbacks = callback_list(
            callbacks,
            self.model,
            chief=self.runner.chief,
            history=False,
            verbose=_verbosity(verbose),
            epochs=1,
            steps=steps,
        )
        return self._predictor.predict(x, batch_size=batch_size, steps=steps, callbacks=callbacks)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs of one batch; see `keras.Model.predict_on_batch`."""
        return self._predictor.predict_batch(x)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: "dict | None" = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one global batch, cut over the replicas; see `keras.Model.train_on_batch`."""
        seams.assert_compiled(self.model, "train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise UsageError("train_on_batch: sample_weight and class_weight cannot be given together")
            sample_weight = tfdist_data.class_weights_of(y, class_weight)
        return self._on_batch((x, y, sample_weight), return_dict, train=True)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Evaluates one global batch, cut over the replicas; see `keras.Model.test_on_batch`."""
        seams.assert_compiled(self.model, "test_on_batch")
        return self._on_batch((x, y, sample_weight), return_dict, train=False)

    def _on_batch(self, data: tuple, return_dict: bool, *, train: bool) -> Any:
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
        batch, spec = self.runner.split_batch(data)
        functions = self.runner.functions(spec)
        self.model.reset_metrics()
        layout = layout_of(None)
        logs = as_python(functions.train_batch(batch, layout).logs if train else functions.test_batch(batch, layout))
        return logs if return_dict else seams.flatten_logs(self.model, logs)

    def _evaluate(self, feed: "tfdist_data.Feed", callbacks: Any) -> dict[str, Any]:
        model, runner = self.model, self.runner
        functions = runner.functions(feed.element_spec)
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        logs = None
        calls = runner.test_calls(
            feed,
            steps=runner.agreed_steps(feed),
            steps_per_call=model.steps_per_execution,
            before=callbacks.on_test_batch_begin,
        )
        done = 0
        for last_step, logs in calls:
            if not done:
                runner.require_same_batch(feed)
            done = last_step + 1
            callbacks.on_test_batch_end(last_step, logs)
            if model.stop_evaluating:
                break
        if not done:
            raise UsageError(_NO_BATCH.format(what="evaluate", argument="steps"))
        results = as_python(functions.logs() if not seams.has_own_test_step(model) else logs)
        callbacks.on_test_end(results)
        return results

    def _follow_restored_chief(self, callbacks: Any) -> None:
        """Takes over what a callback restored on the chief (BackupAndRestore)."""
        runner, model = self.runner, self.model
        if runner.num_workers == 1 or not restores(callbacks):
            return
        variables = list(model.variables)
        if isinstance(model.optimizer, keras.Optimizer):
            variables.extend(model.optimizer.variables)
        metrics = {id(v) for metric in model.metrics for v in metric.variables}
        broadcast_from_chief(runner.strategy, [v for v in variables if id(v) not in metrics])
        seams.set_initial_epoch(model, broadcast_int(runner.strategy, seams.initial_epoch(model) or 0))


_NO_BATCH = (
    "{what}: the data gave no batch; check the dataset and {argument} (a generator can be read once only: give a "
    "tf.data.Dataset or a keras.utils.PyDataset to read it again)"
)


def _verbosity(verbose: Any) -> int:
    return 1 if verbose == "auto" else int(verbose)


def _is_validation_epoch(epoch: int, frequency: Any) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency
