"""What one replica knows about its part of the global batch while its step is traced."""

import dataclasses
import threading

import keras
import tensorflow as tf

from tfdist.training.marks import Marks


@dataclasses.dataclass
class DeferredLoss:
    """A loss term whose denominator is known only after the last micro-batch.

    Attributes:
        numerator: scalar, this micro-batch's weighted sum.
        count: scalar, this micro-batch's part of the denominator.
        slot: which of the model's losses it belongs to.
    """

    numerator: tf.Tensor
    count: tf.Tensor
    slot: int


@dataclasses.dataclass
class Frame:
    """One replica's (micro-)batch within the global batch.

    tfdist keeps Keras's convention that a loss is a mean over the examples at hand, so that user code reads
    the same as on one device. The gradient of the global batch is then the sum over all replicas of
    `share * gradient of the local loss`.

    Attributes:
        count: int32 scalar, examples of this batch that count. 0 marks a batch of one dummy example.
        total: int32 scalar, examples of the global batch.
        share: count / total; a Python float where it is known while tracing.
        num_replicas: replicas in the strategy.
        additive: losses are parts of a sum (`distribute_reduction_method="sum"`), not means.
        uneven_shapes: values of one example may have different sizes on different replicas.
        defer: terms with a denominator from the data are put in `deferred` instead of the loss.
        compiled: the code runs inside an XLA cluster, where no replica can talk to another.
        sum_like: tensors from `add_loss` that are sums over the batch (activity regularizers).
        deferred: see `defer`.
        updated: by id, the non-trainable variables that this replica's layers have assigned to; its micro-batches
            share it.
        stamps: begin and end of each aggregation of gradients, one after the other (see `stamps.stamp`); None where
            the step is not timed.
        marks: where the step notes how far it has come; None where nobody watches.
    """

    count: tf.Tensor
    total: tf.Tensor
    share: "float | tf.Tensor"
    num_replicas: int
    additive: bool = False
    uneven_shapes: bool = False
    defer: bool = False
    compiled: bool = False
    sum_like: list = dataclasses.field(default_factory=list)
    deferred: list[DeferredLoss] = dataclasses.field(default_factory=list)
    updated: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)
    stamps: "list[tf.Tensor] | None" = None
    marks: "Marks | None" = None

    @property
    def loss_weight(self) -> "float | tf.Tensor":
        """What a local loss is multiplied with so that the sum over replicas is the global loss."""
        return 1.0 if self.additive else self.share

    def weighted(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns this replica's contribution to the global value of `loss`."""
        weight = self.loss_weight
        return loss if isinstance(weight, float) and weight == 1.0 else loss * tf.cast(weight, loss.dtype)

    def as_local(self, contribution: tf.Tensor) -> tf.Tensor:
        """The inverse of `weighted`: 0 where this replica has no example."""
        weight = self.loss_weight
        if isinstance(weight, float):
            return contribution if weight == 1.0 else contribution / weight
        return tf.math.divide_no_nan(contribution, tf.cast(weight, contribution.dtype))


class FrameStack(threading.local):
    """The frames of the replica whose step this thread is tracing.

    MirroredStrategy traces each replica in a thread of its own, so thread-local is replica-local.
    """

    def __init__(self):
        super().__init__()
        self.frames: list[Frame] = []

    @property
    def current(self) -> Frame:
        """The innermost frame."""
        return self.frames[-1]

    def push(self, frame: Frame) -> None:
        """Enters `frame`."""
        self.frames.append(frame)

    def pop(self) -> None:
        """Leaves the innermost frame."""
        self.frames.pop()


def make_frame(
    count: tf.Tensor,
    total: tf.Tensor,
    *,
    num_replicas: int,
    full_batches: bool,
    presharded: bool,
    additive: bool = False,
) -> Frame:
    """Returns the frame of a whole replica batch.

    Args:
        count: int32 scalar, this replica's examples.
        total: int32 scalar, examples of the global batch; ignored where `presharded`.
        num_replicas: replicas in the strategy.
        full_batches: every replica has the same number of examples in every batch.
        presharded: no worker knows the global batch, so the counts are summed over the replicas. The
            all-reduce needs nothing but the input and hides behind the forward pass.
        additive: see `Frame`.
    """
    if presharded and num_replicas > 1:
        context = tf.distribute.get_replica_context()
        # The copy has this replica's device; what comes straight from an iterator may have none to reduce on.
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(count))
    elif presharded:
        total = count
    if num_replicas == 1:
        share: float | tf.Tensor = 1.0
    elif full_batches:
        share = 1.0 / num_replicas
    else:
        share = tf.math.divide_no_nan(tf.cast(count, tf.float32), tf.cast(total, tf.float32))
    return Frame(
        count=count,
        total=total,
        share=share,
        num_replicas=num_replicas,
        additive=additive,
        uneven_shapes=presharded and num_replicas > 1,
    )
