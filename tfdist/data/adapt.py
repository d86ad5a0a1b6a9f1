"""From what Keras's training methods accept to a source."""

import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import keras_adapters
from tfdist.data.source import ArraySource, BatchSource, ExampleSource
from tfdist.errors import UsageError

DEFAULT_BATCH_SIZE = 32


def as_source(dataset: Any, *, batch_size: "int | None" = None) -> "ExampleSource | BatchSource":
    """Returns `dataset` as a source.

    Args:
        dataset: a source (returned as it is), a `tf.data.Dataset` of global batches, a PyDataset, a generator of
            batches, or arrays `(x, y)` or `(x, y, sample_weight)`, which are shuffled.
        batch_size: global batch size for arrays; 32 by default.
    """
    if isinstance(dataset, ExampleSource | BatchSource):
        return dataset
    if isinstance(dataset, tuple):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(dataset)
        return from_keras(x, y, sample_weight, batch_size=batch_size)
    return from_keras(dataset, batch_size=batch_size)


def from_keras(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: "int | None" = None,
    shuffle: Any = True,
    class_weight: "dict | None" = None,
    steps: "int | None" = None,
    name: str = "x",
) -> "ExampleSource | BatchSource":
    """Returns the source for the arguments of `keras.Model.fit`, `evaluate` or `predict`.

    Args:
        x: arrays, a `tf.data.Dataset` of global batches, a `keras.utils.PyDataset`, a generator of batches, or one of
            tfdist's own sources.
        y: labels, for arrays.
        sample_weight: weights, for arrays.
        batch_size: global batch size, for arrays; 32 by default.
        shuffle: draw a new order each epoch (arrays, PyDatasets).
        class_weight: weight of each class.
        steps: batches of an epoch.
        name: how to name `x` in messages.

    Raises:
        UsageError: data that cannot be batched, no data, or arrays of different lengths.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise UsageError(f"batch_size={batch_size!r}: an integer of at least 1 is needed")
    if steps is not None and steps < 1:
        raise UsageError(f"steps={steps!r}: an integer of at least 1 is needed")
    if isinstance(x, ExampleSource | BatchSource):
        if y is not None or sample_weight is not None or class_weight is not None:
            raise UsageError(f"{name} is a tfdist source, which holds labels and weights itself; give no y or weights")
        return x if steps is None else x.with_steps(steps)
    if isinstance(x, tf.data.Dataset):
        return _from_dataset(x, y, sample_weight, class_weight, steps)
    if isinstance(x, keras.utils.PyDataset):
        return _from_py_dataset(x, y, sample_weight, class_weight, steps, shuffle)
    if isinstance(x, types.GeneratorType) or (isinstance(x, Iterator) and not hasattr(x, "shape")):
        return _from_generator(x, y, sample_weight, class_weight, steps)
    if not keras_adapters.are_arrays((x, y, sample_weight)):
        raise UsageError(
            f"{name} of type {type(x).__name__}: give arrays, a tf.data.Dataset, a keras.utils.PyDataset or a generator"
        )
    return _from_arrays(x, y, sample_weight, class_weight, batch_size, shuffle, steps)


def split_validation(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple, tuple]:
    """Returns ((x, y, sample_weight), (x, y, sample_weight)): the first rows and the last, as Keras splits them."""
    if not 0 < fraction < 1:
        raise UsageError(f"validation_split={fraction!r}: a fraction between 0 and 1 is needed")
    if not keras_adapters.are_arrays((x, y, sample_weight)):
        raise UsageError(
            f"validation_split={fraction}: only arrays can be split, not {type(x).__name__}; give validation_data"
        )
    first, last = keras_adapters.train_validation_split((x, y, sample_weight), fraction)
    return tuple(first), tuple(last)


def class_weights_of(y: Any, class_weight: dict) -> Any:
    """Returns the sample weights that `class_weight` means for labels `y`."""
    return keras_adapters.class_weights_of(y, class_weight)


def unpack_validation(data: Any) -> tuple[Any, Any, Any]:
    """Returns (x, y, sample_weight) of a `validation_data` argument."""
    return keras.utils.unpack_x_y_sample_weight(data)


def _from_arrays(
    x: Any, y: Any, sample_weight: Any, class_weight: "dict | None", batch_size: "int | None", shuffle: Any, steps: Any
) -> "ExampleSource | BatchSource":
    sizes = {
        label: sorted({int(leaf.shape[0]) for leaf in keras.tree.flatten(part) if leaf is not None})
        for label, part in (("x", x), ("y", y), ("sample_weight", sample_weight))
        if part is not None and all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in keras.tree.flatten(part))
    }
    if len({size for group in sizes.values() for size in group}) > 1:
        described = ", ".join(f"{label}: {'/'.join(map(str, group))}" for label, group in sizes.items())
        raise UsageError(f"the arrays have different numbers of rows ({described}); each example needs one row in all")
    if any(0 in group for group in sizes.values()):
        raise UsageError("x holds no examples")
    leaves = keras.tree.flatten((x, y, sample_weight))
    if any(isinstance(leaf, tf.SparseTensor) or type(leaf).__module__.startswith("scipy.sparse") for leaf in leaves):
        dataset, adapter = keras_adapters.batch_dataset(
            x, y, sample_weight, class_weight, batch_size or DEFAULT_BATCH_SIZE
        )
        return _stream(dataset, num_batches=adapter.num_batches, steps=steps)
    arrays = keras_adapters.packed_arrays(x, y, sample_weight, class_weight)
    rows = int(keras.tree.flatten(arrays)[0].shape[0])
    if batch_size is None:
        batch_size = -(-rows // steps) if steps else DEFAULT_BATCH_SIZE
    source = ArraySource(arrays, batch_size=batch_size, shuffle=bool(shuffle))
    return source if steps is None else source.with_steps(steps)


def _from_dataset(
    dataset: tf.data.Dataset, y: Any, sample_weight: Any, class_weight: "dict | None", steps: "int | None"
) -> BatchSource:
    spec = dataset.element_spec
    if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(spec)):
        raise UsageError(
            f"the dataset's elements are single examples or scalars, not batches ({spec}); add .batch(BATCH_SIZE)"
        )
    policy = dataset.options().experimental_distribute.auto_shard_policy
    dataset, _ = keras_adapters.batch_dataset(dataset, y, sample_weight, class_weight)
    cardinality = int(dataset.cardinality())
    if cardinality == 0:
        raise UsageError("the dataset is empty")
    return _stream(
        dataset,
        num_batches=cardinality if cardinality > 0 else None,
        infinite=cardinality == tf.data.INFINITE_CARDINALITY,
        steps=steps,
        presharded=policy == tf.data.experimental.AutoShardPolicy.OFF,
        fingerprinted=True,
    )


def _from_generator(
    generator: Any, y: Any, sample_weight: Any, class_weight: "dict | None", steps: "int | None"
) -> BatchSource:
    def weighted() -> Iterator:
        for batch in generator:
            batch = batch if isinstance(batch, tuple | list) else (batch,)
            if class_weight is not None and len(batch) == 2:
                batch = (*batch, keras_adapters.class_weights_of(batch[1], class_weight))
            yield tuple(batch)

    batches = weighted()
    first = next(batches, None)
    if first is None:
        raise UsageError("the generator gave nothing; at least one batch is needed")

    def all_batches() -> Iterator:  # a generator can be read once only
        yield first
        yield from batches

    try:
        dataset, _ = keras_adapters.batch_dataset(all_batches(), y, sample_weight, None)
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the generator cannot be used: {error}") from error
    return _stream(dataset, steps=steps, one_shot=True)


def _from_py_dataset(
    data: keras.utils.PyDataset, y: Any, sample_weight: Any, class_weight: "dict | None", steps: Any, shuffle: Any
) -> BatchSource:
    finite = data.num_batches
    if finite == 0:
        raise UsageError("the PyDataset has no batches")
    ordered = data if finite is None or not shuffle else _Shuffled(data)
    dataset, adapter = keras_adapters.batch_dataset(ordered, y, sample_weight, class_weight)
    return _stream(
        dataset,
        num_batches=finite,
        infinite=finite is None,
        steps=steps,
        on_epoch_begin=adapter.on_epoch_begin,
        on_epoch_end=adapter.on_epoch_end,
    )


class _Shuffled(keras.utils.PyDataset):
    """A PyDataset whose batches come in another order every epoch, the same on every worker."""

    def __init__(self, inner: keras.utils.PyDataset):
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner = inner
        self._epoch = -1
        self._order = np.arange(inner.num_batches)

    @property
    def num_batches(self) -> int:
        return self._inner.num_batches

    def __len__(self) -> int:
        return self._inner.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._inner[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()
        self._epoch += 1
        generator = np.random.Generator(np.random.PCG64([tf_seed(), self._epoch]))
        self._order = generator.permutation(self._inner.num_batches)

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()


def tf_seed() -> int:
    """Returns the job's seed, 0 where there is none."""
    from tfdist.strategy import global_seed

    return global_seed() or 0


def _stream(dataset: tf.data.Dataset, **options: Any) -> BatchSource:
    spec = dataset.element_spec
    if any(isinstance(leaf, tf.OptionalSpec) for leaf in tf.nest.flatten(spec)):
        raise UsageError("the batches hold None; leave such parts out: (x,), (x, y) or (x, y, sample_weight)")
    if isinstance(spec, list):
        dataset = dataset.map(lambda *data: tuple(data))
    elif not isinstance(spec, tuple):
        dataset = dataset.map(lambda data: (data,))
    elif len(spec) > 3:
        raise UsageError(f"the batches have {len(spec)} parts; give (x,), (x, y) or (x, y, sample_weight)")
    return BatchSource(lambda: dataset, **options)
