"""The replacements on a model's own objects that make a traced step distributed.

They last while the step is traced and are then put back, so that saving, loading and plain calls of the
model never meet them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training import seams
from tfdist.training.collective_state import all_reduce_packed
from tfdist.training.frame import FrameStack
from tfdist.training.losses import global_loss


@contextlib.contextmanager
def step_scope(model: keras.Model, frames: FrameStack, num_replicas: int) -> Iterator[None]:
    """Makes losses, moments, random seeds and optimizers of `model` see the global batch.

    Enter it outside of `strategy.run`: the replicas are traced in turns, each up to its next exchange, so a
    replacement made inside would be met by the others. What is a replica's own is in the frame that it pushes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_global_losses(model, frames))
        stack.enter_context(_additional_losses(model, frames))
        stack.enter_context(_recorded_updates(model, frames))
        for optimizer in seams.optimizers_of(model):
            for part in seams.with_inner_optimizers(optimizer):
                stack.enter_context(seams.local_updates(part))
        if num_replicas > 1:
            for generator in seams.seed_generators(model):
                stack.enter_context(seams.replaced(generator, next=_seed_of_replica(generator)))
            for layer in seams.synchronized_batch_norms(model):
                stack.enter_context(seams.replaced(layer, _moments=_global_moments(layer, frames)))
        yield


@contextlib.contextmanager
def own_step_scope(model: keras.Model, frames: FrameStack) -> Iterator[None]:
    """Makes the losses and trackers that a model's own step calls add up to the global loss; see `step_scope`."""
    with contextlib.ExitStack() as stack:
        for i, loss in enumerate(seams.losses_of(model)):
            if seams.loss_is_reducible(loss):
                stack.enter_context(seams.called_as(loss, global_loss(loss, frames, i)))
        for metric in seams.default_metric_states(model):
            if type(metric) is keras.metrics.Mean:
                stack.enter_context(seams.replaced(metric, update_state=_mean_of_losses(metric, frames)))
        tracker = seams.loss_tracker(model)
        if tracker is not None:
            stack.enter_context(seams.replaced(tracker, update_state=_stock_tracker(tracker, frames)))
        yield


@contextlib.contextmanager
def _recorded_updates(model: keras.Model, frames: FrameStack) -> Iterator[None]:
    """Collects in each frame the non-trainable float variables that a layer assigns to.

    A replica without examples keeps the old values: its dummy example leaves no trace.
    """
    synchronized = {id(v) for layer in seams.synchronized_batch_norms(model) for v in layer.variables}
    with contextlib.ExitStack() as stack:
        for variable in seams.non_trainable_variables(model):
            if id(variable) not in synchronized and variable.aggregation == "none":
                stack.enter_context(seams.replaced(variable, assign=_recording_assign(variable, frames)))
        yield


@contextlib.contextmanager
def _global_losses(model: keras.Model, frames: FrameStack) -> Iterator[None]:
    stock: list = []
    with contextlib.ExitStack() as stack:

        def replace() -> None:
            slots = seams.loss_slots(model)
            stock[:] = slots
            slots[:] = [
                slot._replace(loss=global_loss(slot.loss, frames, i)) if seams.loss_is_reducible(slot.loss) else slot
                for i, slot in enumerate(stock)
            ]
            for metric in seams.output_loss_metrics(model):
                stack.enter_context(seams.replaced(metric, update_state=_output_loss(metric, frames)))

        if seams.loss_slots(model) is not None:
            replace()
        else:
            # The compiled loss of a model with its own step is built when that step first calls it.
            stack.enter_context(seams.when_loss_is_built(model, replace))
        try:
            yield
        finally:
            if stock:
                seams.loss_slots(model)[:] = stock


@contextlib.contextmanager
def _additional_losses(model: keras.Model, frames: FrameStack) -> Iterator[None]:
    def aggregate(loss: tf.Tensor) -> tf.Tensor:
        frame = frames.current
        value = seams.additional_loss(model, loss)
        if any(loss is term for term in frame.sum_like):
            return frame.as_local(value)
        return value if not frame.additive else value * tf.cast(frame.share, value.dtype)

    def summed(regularizer: Callable) -> Callable:
        def call(output: Any) -> tf.Tensor:
            value = tf.convert_to_tensor(regularizer(output))
            frames.current.sum_like.append(value)
            return value

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(seams.replaced(model, _aggregate_additional_loss=aggregate))
        for layer in seams.layers(model):
            if getattr(layer, "activity_regularizer", None) is not None:
                replacement = summed(layer.activity_regularizer)
                stack.enter_context(seams.replaced(layer, activity_regularizer=replacement))
        yield


def _output_loss(metric: keras.metrics.Mean, frames: FrameStack) -> Callable:
    def update_state(value: tf.Tensor, sample_weight: Any = None) -> None:
        frame = frames.current
        # Keras hands over the value times the number of replicas.
        value = tf.cast(value, metric.dtype) / frame.num_replicas
        metric.total.assign_add(tf.reduce_sum(frame.weighted(value)))
        metric.count.assign_add(tf.cast(frame.share, metric.dtype))

    return update_state


def _stock_tracker(metric: keras.metrics.Mean, frames: FrameStack) -> Callable:
    by_model = _mean_of_losses(metric, frames)

    def update_state(value: tf.Tensor, sample_weight: Any = None) -> None:
        if seams.called_by_keras():  # which hands over the value times the number of replicas
            track_loss(metric, tf.cast(value, metric.dtype) / frames.current.num_replicas, frames)
        else:
            by_model(value, sample_weight)

    return update_state


def track_loss(metric: keras.metrics.Mean, loss: tf.Tensor, frames: FrameStack) -> None:
    """Adds this replica's part of the global loss to `metric`, weighted by the examples of the batch."""
    frame = frames.current
    contribution = tf.cast(frame.weighted(loss), metric.dtype)
    if contribution.shape.rank:
        # A loss without reduction is reported as the mean of its entries.
        weight = tf.cast(frame.count, metric.dtype) / tf.cast(tf.size(contribution), metric.dtype)
    else:
        weight = tf.cast(frame.total, metric.dtype)
    metric.total.assign_add(tf.reduce_sum(contribution) * weight)
    metric.count.assign_add(tf.cast(frame.count, metric.dtype))


def _mean_of_losses(metric: keras.metrics.Mean, frames: FrameStack) -> Callable:
    stock = metric.update_state

    def update_state(values: Any, sample_weight: Any = None) -> None:
        frame = frames.current
        values = tf.cast(tf.convert_to_tensor(values), metric.dtype)
        if values.shape.rank == 0 and sample_weight is None:
            metric.total.assign_add(frame.weighted(values))
            metric.count.assign_add(tf.cast(frame.share, metric.dtype))
            return
        # The one example of an empty replica is a dummy: it must not count.
        present = tf.cast(frame.count > 0, metric.dtype)
        weights = tf.ones_like(values) if sample_weight is None else tf.cast(sample_weight, metric.dtype)
        stock(values, sample_weight=weights * present)

    return update_state


def _seed_of_replica(generator: keras.random.SeedGenerator) -> Callable:
    stock = generator.next

    def next_seed(ordered: bool = True) -> tf.Tensor:
        seed = stock(ordered=ordered)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        # The state stays the same on all replicas; replica 0 draws what one device would.
        stride = tf.constant([0x3504F333, 0], tf.int64) * tf.cast(replica, tf.int64)
        return seed + tf.cast(stride, seed.dtype)

    return next_seed


def _global_moments(layer: keras.layers.BatchNormalization, frames: FrameStack) -> Callable:
    axes = seams.batch_norm_axes(layer)

    def moments(inputs: tf.Tensor, mask: "tf.Tensor | None") -> tuple[tf.Tensor, tf.Tensor]:
        frame = frames.current
        if frame.compiled:
            raise UsageError(
                f"jit_compile=True: layer {layer.name!r} has synchronized=True, whose statistics the replicas must "
                "exchange inside the compiled part, which XLA cannot do; use jit_compile=False"
            )
        # Shifted by the moving mean, which all replicas share: E[x^2] - E[x]^2 would cancel for large means.
        shape = [1] * len(inputs.shape)
        shape[layer.axis] = -1
        shift = tf.stop_gradient(tf.cast(tf.convert_to_tensor(layer.moving_mean.value), inputs.dtype))
        centred = inputs - tf.reshape(shift, shape)
        count = tf.ones_like(inputs)
        if mask is not None:
            count = count * tf.cast(mask, inputs.dtype)[..., None]
            centred = centred * count
        present = tf.cast(frame.count > 0, inputs.dtype)
        local = [present * tf.reduce_sum(part, axes) for part in (centred, tf.square(centred), count)]
        total, squares, count = all_reduce_packed(local)
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        return mean + shift, variance

    return moments


def _recording_assign(variable: keras.Variable, frames: FrameStack) -> Callable:
    stock = variable.assign

    def assign(value: Any) -> Any:
        if not frames.frames:
            return stock(value)
        frame = frames.current
        frame.updated[id(variable)] = variable
        if not isinstance(frame.share, float):
            value = tf.where(frame.count > 0, value, tf.convert_to_tensor(variable.value))
        return stock(value)

    return assign
