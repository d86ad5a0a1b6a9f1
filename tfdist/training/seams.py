"""Every place where tfdist leans on Keras internals, so that a new Keras release can break one file only.

`tests/training/test_seams.py` states what each seam relies on. Nothing here patches a Keras module or
class: attributes are replaced on single objects, for as long as a step is being traced, and put back.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator as keras_seed_generator
from keras.src.trainers.trainer import Trainer

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Sets `attributes` on the instance `owner` while the context lasts, past any attribute tracking."""
    before = {name: vars(owner).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, value)


@contextlib.contextmanager
def without_effect() -> Iterator[None]:
    """A scope in which layers, losses and metrics create their variables but change none."""
    with keras.StatelessScope(), SymbolicScope():
        yield


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the model and all of its layers, nested ones too."""
    return model._flatten_layers()


def has_own_train_step(model: keras.Model) -> bool:
    """Whether the model's class brings its own `train_step`."""
    return type(model).train_step is not keras.Model.train_step


def has_own_test_step(model: keras.Model) -> bool:
    """Whether the model's class brings its own `test_step`."""
    return type(model).test_step is not keras.Model.test_step


def has_own_predict_step(model: keras.Model) -> bool:
    """Whether the model's class brings its own `predict_step`."""
    return type(model).predict_step is not keras.Model.predict_step


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> tf.Tensor:
    """Calls the model's `compute_loss`, also an override from before it had a `training` argument."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def call_model(model: keras.Model, x: Any, training: bool) -> Any:
    """Runs the forward pass as Keras's own steps do."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def loss_tracker(model: keras.Model) -> "keras.metrics.Mean | None":
    """Returns the metric that holds the reported loss."""
    return model._loss_tracker


def output_loss_metrics(model: keras.Model) -> list[keras.metrics.Mean]:
    """Returns the trackers of the single outputs' losses (empty with one output)."""
    return list(model._compile_loss.metrics) if model._compile_loss is not None else []


def loss_slots(model: keras.Model) -> "list | None":
    """Returns the list of compiled losses, each a named tuple (path, loss, loss_weight, name); None before build."""
    return model._compile_loss._flat_losses if model._compile_loss is not None else None


@contextlib.contextmanager
def when_loss_is_built(model: keras.Model, then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` as soon as the compiled loss, if there is one, has its slots, while the context lasts."""
    compiled = model._compile_loss
    if compiled is None:
        yield
        return
    stock = compiled.build

    def build(y_true: Any, y_pred: Any) -> None:
        stock(y_true, y_pred)
        then()

    with replaced(compiled, build=build):
        yield


def loss_weight(model: keras.Model, slot: int) -> "float | None":
    """Returns the weight of a compiled loss, or None."""
    return loss_slots(model)[slot].loss_weights


def loss_is_reducible(loss: Any) -> bool:
    """Whether `loss` reduces in Keras's standard way, so that tfdist can do the reduction itself."""
    return isinstance(loss, keras.losses.Loss) and type(loss).__call__ is keras.losses.Loss.__call__


def additional_loss(model: keras.Model, loss: tf.Tensor) -> tf.Tensor:
    """One term of `add_loss` or a regularizer as a scalar, without Keras's division by the number of replicas."""
    return Trainer._aggregate_additional_loss(model, loss)


def compiled_parts_built(model: keras.Model) -> bool:
    """Whether the compiled loss and metrics have created their variables."""
    parts = (model._compile_loss, model._compile_metrics)
    return all(part is None or part.built for part in parts)


def get_mask(tensor: Any) -> "tf.Tensor | None":
    """Returns the Keras mask that travels with `tensor`."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Makes `mask` travel with `tensor`."""
    if mask is not None:
        tensor._keras_mask = mask


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the float variables that layers update by themselves (moving statistics and the like).

    Left out: weights of frozen layers, metrics and random seeds, which are not updated or not to be averaged.
    """
    found = []
    for layer in layers(model):
        if layer.trainable:
            found.extend(v for v in layer._non_trainable_variables if v.dtype.startswith(("float", "bfloat")))
    return found


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Returns the generators that the model's random layers draw from, and the global one."""
    found = [keras_seed_generator.global_seed_generator()]
    for layer in layers(model):
        found.extend(layer._seed_generators)
    return found


def synchronized_batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the layers whose batch statistics are those of the global batch."""
    return [
        layer for layer in layers(model) if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]


def batch_norm_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Returns the axes over which `layer` takes its moments."""
    return layer._reduction_axes


@contextlib.contextmanager
def local_updates(optimizer: keras.Optimizer) -> Iterator[None]:
    """Makes `optimizer` update one replica's variables and nothing else while the context lasts.

    Keras's TensorFlow optimizers aggregate and enter `merge_call` inside the update, which `tf.cond` forbids
    (so EMA, accumulation and loss scaling fail under a strategy). Their backend-agnostic base class does the
    same arithmetic on plain assignments. It is put between the optimizer's own class and the TensorFlow class,
    so that what the optimizer's class overrides (Nadam, Muon) still runs, and reaches it through `super()`.
    """
    stock = type(optimizer)
    object.__setattr__(optimizer, "__class__", type(stock.__name__, (stock, _LocalUpdates), {}))
    own = {"_tf_apply": optimizer._common_apply} if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else {}
    try:
        with replaced(optimizer, **own):
            yield
    finally:
        object.__setattr__(optimizer, "__class__", stock)


class _LocalUpdates(keras.Optimizer):
    """The base class's arithmetic instead of the TensorFlow class's, which comes behind this one."""

    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _backend_update_step = BaseOptimizer._backend_update_step
    _backend_increment_gradient_accumulators = BaseOptimizer._backend_increment_gradient_accumulators
    _overwrite_model_variables_with_average_value = BaseOptimizer._overwrite_model_variables_with_average_value


def with_inner_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns `optimizer` and those that it wraps (loss scaling) or gives variables to (MultiOptimizer)."""
    inner = [getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or [])]
    found = [optimizer]
    for part in inner:
        if isinstance(part, keras.Optimizer):
            found.extend(with_inner_optimizers(part))
    return found


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the compiled optimizer and every other one that the model's own steps can reach."""
    return _reachable(model, keras.Optimizer, [model.optimizer])


def losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the loss objects that the model's own steps can reach, which they may call by themselves."""
    return _reachable(model, keras.losses.Loss, [])


def _reachable(model: keras.Model, kind: type, first: list) -> list:
    """Objects among `first`, the model's attributes, and what its own steps take from around them, each once."""
    places = [first, *vars(model).values()]
    for name in ("train_step", "test_step", "compute_loss"):
        method = getattr(type(model), name)
        if method is not getattr(keras.Model, name) and inspect.isfunction(inspect.unwrap(method)):
            around = inspect.getclosurevars(inspect.unwrap(method))
            places += [*around.nonlocals.values(), *around.globals.values()]
    found: list = []
    for place in places:
        items = place.values() if isinstance(place, dict) else place
        for item in items if isinstance(place, list | tuple | dict) else [place]:
            if isinstance(item, kind) and not any(item is other for other in found):
                found.append(item)
    return found


@contextlib.contextmanager
def called_as(loss: keras.losses.Loss, call: Callable) -> Iterator[None]:
    """Makes calls of the object `loss` run `call` while the context lasts (Python finds `__call__` on the class)."""
    stock = type(loss)
    instead = type(stock.__name__, (stock,), {"__call__": lambda _, *args, **options: call(*args, **options)})
    object.__setattr__(loss, "__class__", instead)
    try:
        yield
    finally:
        object.__setattr__(loss, "__class__", stock)


def called_by_keras() -> bool:
    """Whether the caller of the function that asks is Keras's own step, not a model's."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("keras.src.")


def default_metric_states(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that `update_state` calls on examples change: all but the loss trackers."""
    own = [loss_tracker(model), *output_loss_metrics(model)]
    return [metric for metric in model.metrics if not any(metric is other for other in own)]


def logs_match_metrics(logs: Any, results: dict) -> bool:
    """Whether a step's logs name the same values as the model's metrics, so that those can replace them."""
    return isinstance(logs, dict) and set(logs) == set(results)


def flatten_logs(model: keras.Model, logs: dict) -> Any:
    """Returns `logs` as Keras's methods do without `return_dict`: a scalar, or a list in metric order."""
    return model._flatten_metrics_in_order(logs)


def initial_epoch(model: keras.Model) -> "int | None":
    """Returns the epoch that a restoring callback (BackupAndRestore) asks `fit` to start from."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: "int | None") -> None:
    """Sets what `initial_epoch` returns."""
    model._initial_epoch = epoch


def assert_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's own error where the model has not been compiled."""
    model._assert_compile_called(method)


def compiled_as(model: keras.Model) -> tuple:
    """Returns a key that changes when the model is compiled anew or its trainable weights change."""
    parts = (
        model.optimizer,
        model._compile_loss,
        model._compile_metrics,
        model.run_eagerly,
        model.jit_compile,
    )
    return (*map(id, parts[:3]), *parts[3:], tuple(id(v) for v in model.trainable_variables))


def joined_outputs(outputs: list) -> object:
    """Joins the outputs of batches along the rows, as Keras's `predict` does (ragged where shapes differ)."""
    from keras.src.backend.tensorflow import trainer as keras_trainer

    return keras_trainer.convert_to_np_if_not_ragged(keras_trainer.potentially_ragged_concat(outputs))


def predict_step_key(model: keras.Model) -> tuple:
    """Returns a key that changes when the model is compiled to run eagerly or back."""
    return (bool(model.compiled and model.run_eagerly),)
