"""Creating every variable of a model before its step is traced, under its strategy."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training import seams


def build_model(model: keras.Model, spec: Any, strategy: tf.distribute.Strategy) -> None:
    """Builds layers, compiled losses and metrics, and the optimizer from the spec of a batch.

    No data is read: the forward pass is traced once, without effect, as Keras's own build does.

    Args:
        model: the model, compiled.
        spec: `tf.TypeSpec`s of `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        strategy: the strategy under which the model was made.
    """
    own_step = seams.has_own_train_step(model)
    layers_built = all(layer.built for layer in seams.layers(model))
    with strategy.scope():
        seams.seed_generators(model)  # Keras makes its global one when first asked for: not while a step is traced
        if not layers_built or not (own_step or seams.compiled_parts_built(model)):
            _trace(model, spec, with_loss=not own_step)
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built and model.trainable_variables:
            optimizer.build(model.trainable_variables)
    require_scope(model, strategy)


def _trace(model: keras.Model, spec: Any, *, with_loss: bool) -> None:
    def forward(*data: Any) -> None:
        with seams.without_effect():
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            try:
                y_pred = seams.call_model(model, x, training=False)
            except NotImplementedError:
                # A model that is only a train_step over its parts has no forward pass of its own.
                return
            if with_loss and y is not None:
                model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            if with_loss:
                seams.compute_loss(model, x, y, y_pred, sample_weight, training=False)

    tf.function(forward, autograph=False).get_concrete_function(*spec)


def require_scope(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Checks that every variable of `model` and of its optimizers was created under `strategy`.

    Raises:
        UsageError: naming the first variable that was not.
    """
    variables = list(model.variables)
    for optimizer in seams.optimizers_of(model):
        variables.extend(optimizer.variables)
    for variable in variables:
        value = variable.value if isinstance(variable, keras.Variable) else variable
        made_under = getattr(value, "distribute_strategy", None)
        distributed = isinstance(strategy, tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy)
        if made_under is strategy or (made_under is None and not distributed):
            continue
        found = "under another strategy" if isinstance(made_under, tf.distribute.Strategy) else "outside of it"
        raise UsageError(
            f"model {model.name!r}: variable {variable.name!r} was created {found}, but the model is to be trained "
            f"under {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas; build and compile the "
            "model inside `with strategy.scope():`"
        )
