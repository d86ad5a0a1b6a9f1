"""Every place where `tfdist.data` leans on Keras's private data adapters.

`tests/data/test_keras_adapters.py` states what each relies on.
"""

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays


def are_arrays(data: Any) -> bool:
    """Whether Keras takes every leaf of `data` for an array."""
    return can_convert_arrays(data)


def packed_arrays(x: Any, y: Any, sample_weight: Any, class_weight: "dict | None") -> tuple[Any, ...]:
    """Returns `(x,)`, `(x, y)` or `(x, y, sample_weight)` as dense or ragged arrays in Keras's dtypes.

    Class weights become sample weights, one weight array is repeated for every output. Lists become tuples, because
    tf.data takes a list for one tensor.
    """
    adapter = ArrayDataAdapter(x, y, sample_weight=sample_weight, class_weight=class_weight, batch_size=1)
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    arrays = keras.tree.lists_to_tuples(arrays)
    return arrays if isinstance(arrays, tuple) else (arrays,)


def train_validation_split(arrays: tuple, fraction: float) -> tuple[tuple, tuple]:
    """Returns the first and the last rows of `arrays`, cut as Keras's `validation_split` does."""
    return array_slicing.train_validation_split(arrays, validation_split=fraction)


def batch_dataset(
    x: Any, y: Any, sample_weight: Any, class_weight: "dict | None", batch_size: "int | None" = None
) -> tuple[tf.data.Dataset, Any]:
    """Returns the dataset that Keras makes of a dataset, generator or PyDataset, and the adapter."""
    adapter = data_adapters.get_data_adapter(
        x, y, sample_weight=sample_weight, class_weight=class_weight, shuffle=False, batch_size=batch_size
    )
    return adapter.get_tf_dataset(), adapter


def class_weights_of(y: Any, class_weight: dict) -> Any:
    """Returns the sample weights that `class_weight` means for labels `y`."""
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
