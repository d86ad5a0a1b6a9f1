"""Two kinds of data: examples that can be picked by index, and ready streams of global batches."""

import abc
import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError


class ExampleSource(abc.ABC):
    """Examples that can be picked by index.

    The global batches of an epoch are a permutation of the indices, drawn from (seed, epoch) alone, so they are
    the same at any number of replicas and workers, and each worker reads its own rows and nothing else.

    Args:
        batch_size: examples of a global batch.
        shuffle: draw a new order every epoch.
        drop_remainder: leave out a last batch that is not full.
        seed: seed of the shuffles; None takes that of the job.
    """

    num_classes: "int | None" = None
    """Number of classes, where labels are class indices."""

    steps: "int | None" = None
    """Batches of an epoch, where that is not one pass; the next epoch goes on where one stopped."""

    def __init__(
        self, *, batch_size: int, shuffle: bool = True, drop_remainder: bool = False, seed: "int | None" = None
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r}: an integer of at least 1 is needed")
        self.batch_size = int(batch_size)
        self.shuffle = bool(shuffle)
        self.drop_remainder = drop_remainder
        self.seed = seed

    @property
    @abc.abstractmethod
    def num_examples(self) -> int:
        """Number of examples."""

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """`tf.TensorSpec`s of one example: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, without batch dimension."""

    @abc.abstractmethod
    def gather(self, indices: tf.Tensor) -> Any:
        """Returns the batch of the examples `indices` (int64, 1-D), in that order. Runs inside `Dataset.map`."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of one pass over the examples."""
        full, left = divmod(self.num_examples, self.batch_size)
        return full if self.drop_remainder or not left else full + 1

    def with_steps(self, steps: int) -> "ExampleSource":
        """Returns this source with epochs of `steps` batches."""
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1:
            raise UsageError(f"steps={steps!r}: an integer of at least 1 is needed")
        limited = copy.copy(self)
        limited.steps = None if steps == self.steps_per_epoch else int(steps)
        return limited

    def order(self, epoch: Any, seed: int) -> tf.Tensor:
        """Returns the order of the examples in `epoch`: int64 indices, a function of (seed, epoch) alone."""
        if not self.shuffle:
            return tf.range(self.num_examples, dtype=tf.int64)
        return _permutation(
            tf.constant(self.num_examples, tf.int64), tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)
        )


class ArraySource(ExampleSource):
    """Arrays in memory, with the examples along the first axis.

    Args:
        arrays: `(x,)`, `(x, y)` or `(x, y, sample_weight)`; each a NumPy array, a tensor, or a list, tuple or dict of
            them.
        batch_size: see `ExampleSource`.
        shuffle: see `ExampleSource`.
        drop_remainder: see `ExampleSource`.
        seed: see `ExampleSource`.
        num_classes: number of classes of integer labels.
    """

    def __init__(
        self,
        arrays: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        drop_remainder: bool = False,
        seed: "int | None" = None,
        num_classes: "int | None" = None,
    ):
        super().__init__(batch_size=batch_size, shuffle=shuffle, drop_remainder=drop_remainder, seed=seed)
        self.arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        self.num_classes = num_classes
        sizes = [_length(leaf) for leaf in keras.tree.flatten(self.arrays)]
        if len(set(sizes)) > 1:
            raise UsageError(f"the arrays have different numbers of rows: {sizes}; each example needs one row in all")
        if not sizes or sizes[0] == 0:
            raise UsageError("the arrays hold no examples")
        self._num_examples = sizes[0]
        self._tensors: Any = None

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return self._num_examples

    @property
    def element_spec(self) -> Any:
        """Specs of one example."""
        return tf.nest.map_structure(_row_spec, self.arrays)

    def gather(self, indices: tf.Tensor) -> Any:
        """Returns the rows `indices` of every array."""
        if self._tensors is None:
            # Held once, outside of the traced function, which would else contain a copy.
            with tf.init_scope(), tf.device("CPU:0"):
                self._tensors = tf.nest.map_structure(_as_tensor, self.arrays)
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices, axis=0), self._tensors)


class BatchSource:
    """A stream of global batches that only its owner knows how to make.

    Every worker iterates the whole stream and takes its rows of each batch, so all must build the same stream.

    Args:
        make: returns the `tf.data.Dataset` of one pass. It is called once; each epoch is a new iteration.
        num_batches: batches of one pass, or None where only the end tells.
        infinite: the stream never ends.
        steps: batches of an epoch. The next epoch then goes on where this one stopped.
        presharded: on each worker the stream holds that worker's part of the global batches.
        fingerprinted: compare the first batch between workers.
        one_shot: the stream can be read once only.
        on_epoch_begin: called before each epoch.
        on_epoch_end: called after each epoch.
    """

    num_classes: "int | None" = None

    def __init__(
        self,
        make: Callable[[int], tf.data.Dataset],
        *,
        num_batches: "int | None" = None,
        infinite: bool = False,
        steps: "int | None" = None,
        presharded: bool = False,
        fingerprinted: bool = False,
        one_shot: bool = False,
        on_epoch_begin: "Callable[[], None] | None" = None,
        on_epoch_end: "Callable[[], None] | None" = None,
    ):
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1):
            raise UsageError(f"steps={steps!r}: an integer of at least 1 is needed")
        if infinite and steps is None:
            raise UsageError("the dataset is infinite: give the number of steps of an epoch (steps_per_epoch or steps)")
        self.make = make
        self.num_batches = num_batches
        self.infinite = infinite
        self.steps = None if steps is None else int(steps)
        self.presharded = presharded
        self.fingerprinted = fingerprinted
        self.one_shot = one_shot
        self.on_epoch_begin = on_epoch_begin or (lambda: None)
        self.on_epoch_end = on_epoch_end or (lambda: None)

    def with_steps(self, steps: int) -> "BatchSource":
        """Returns this source with epochs of `steps` batches."""
        limited = copy.copy(self)
        limited.steps = int(steps)
        return limited


@tf.function(input_signature=[tf.TensorSpec([], tf.int64)] * 3, autograph=False)
def _permutation(size: tf.Tensor, seed: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
    """A function of its own, so that it is traced once and not by every pipeline."""
    indices = tf.range(size, dtype=tf.int64)
    return tf.random.experimental.stateless_shuffle(indices, tf.stack([seed, epoch]), alg="philox")


def _length(leaf: Any) -> int:
    if not hasattr(leaf, "shape") or not len(leaf.shape):
        raise UsageError(f"data of type {type(leaf).__name__} without rows; give arrays with one row for each example")
    return int(leaf.shape[0]) if leaf.shape[0] is not None else int(leaf.nrows())


def _row_spec(leaf: Any) -> tf.TypeSpec:
    if isinstance(leaf, tf.RaggedTensor):
        shape = leaf.shape[1:]
        if leaf.ragged_rank == 1:
            return tf.TensorSpec([None, *leaf.flat_values.shape[1:]], leaf.dtype)
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank - 1, leaf.row_splits.dtype)
    return tf.TensorSpec(leaf.shape[1:], tf.as_dtype(leaf.dtype))


def _as_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.RaggedTensor) else tf.convert_to_tensor(leaf)
