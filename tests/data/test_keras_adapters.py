"""What `tfdist.data.keras_adapters` relies on in Keras's private data adapters."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import keras_adapters


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


def test_arrays_are_what_keras_takes_for_arrays():
    assert keras_adapters.are_arrays((np.zeros(3), {"a": tf.zeros([3])}, None))
    assert keras_adapters.are_arrays([tf.ragged.constant([[1], []])])
    assert not keras_adapters.are_arrays("text")
    assert not keras_adapters.are_arrays(tf.data.Dataset.range(3))
    assert not keras_adapters.are_arrays([[1, 2], [3, 4]])


def test_floats_take_kerass_type_and_lists_become_tuples():
    packed = keras_adapters.packed_arrays([np.zeros((3, 2)), np.arange(3)], np.zeros(3), None, None)
    assert isinstance(packed, tuple) and isinstance(packed[0], tuple)
    assert packed[0][0].dtype == keras.config.floatx()
    assert packed[0][1].dtype == "int64"
    alone = keras_adapters.packed_arrays(np.zeros((3, 2)), None, None, None)
    assert isinstance(alone, tuple) and len(alone) == 1


def test_class_weights_become_sample_weights():
    labels = np.array([0, 2, 1, 2])
    expected = [1.0, 5.0, 3.0, 5.0]
    _, _, weights = keras_adapters.packed_arrays(np.zeros((4, 1)), labels, None, {0: 1.0, 1: 3.0, 2: 5.0})
    np.testing.assert_array_equal(weights, expected)
    one_hot = np.eye(3)[labels]
    for y in (labels, one_hot):
        np.testing.assert_array_equal(keras_adapters.class_weights_of(y, {0: 1.0, 1: 3.0, 2: 5.0}), expected)


def test_one_weight_array_is_repeated_for_every_output():
    weights = np.arange(4.0)
    _, _, packed = keras_adapters.packed_arrays(np.zeros((4, 1)), {"a": np.zeros(4), "b": np.zeros(4)}, weights, None)
    leaves = keras.tree.flatten(packed)
    assert len(leaves) == 2
    for leaf in leaves:
        np.testing.assert_array_equal(leaf, weights)


def test_validation_is_split_off_the_end():
    (x, y, w), (vx, vy, vw) = keras_adapters.train_validation_split((np.arange(10), np.arange(10), None), 0.25)
    assert (list(x), list(vx)) == (list(range(7)), [7, 8, 9])
    assert list(y) == list(x) and list(vy) == list(vx) and w is None and vw is None


def test_datasets_and_adapters():
    inner = tf.data.Dataset.range(5).batch(2)
    dataset, _ = keras_adapters.batch_dataset(inner, None, None, None)
    assert [batch.numpy().tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]

    class Batches(keras.utils.PyDataset):
        begun = ended = 0

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full((3, 1), index), np.full(3, index)

        def on_epoch_begin(self):
            self.begun += 1

        def on_epoch_end(self):
            self.ended += 1

    batches = Batches()
    dataset, adapter = keras_adapters.batch_dataset(batches, None, None, {0: 1.0, 1: 7.0})
    begun = batches.begun
    adapter.on_epoch_begin()
    weights = [w.numpy().tolist() for _, _, w in dataset.take(adapter.num_batches)]
    adapter.on_epoch_end()
    assert (batches.begun - begun, batches.ended) == (1, 1)
    assert weights == [[1.0] * 3, [7.0] * 3]


def test_a_generator_is_looked_at_without_losing_a_batch():
    dataset, _ = keras_adapters.batch_dataset(((np.full((2, 1), i), np.zeros(2)) for i in range(3)), None, None, None)
    assert [int(x[0, 0]) for x, _ in dataset] == [0, 1, 2]


def test_sparse_arrays_are_batched():
    sparse = tf.sparse.from_dense(np.eye(5, dtype="float32"))
    dataset, adapter = keras_adapters.batch_dataset(sparse, np.arange(5), None, None, 2)
    assert adapter.num_batches == 3
    assert [y.numpy().tolist() for _, y in dataset] == [[0, 1], [2, 3], [4]]
    assert all(isinstance(x, tf.SparseTensor) for x, _ in dataset)
