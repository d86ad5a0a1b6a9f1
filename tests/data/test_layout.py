"""Which rows of a global batch each replica takes."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.data import Layout, num_rows, slice_rows
from tfdist.data.rows import zero_rows
from tfdist.errors import UsageError


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


@settings(max_examples=200, deadline=None)
@given(n=st.integers(0, 200), num_replicas=st.integers(1, 17))
def test_rows_cover_the_batch_once_in_order_and_evenly(n, num_replicas):
    parts = [Layout(num_replicas, 0, num_replicas).rows(n, replica) for replica in range(num_replicas)]
    taken = [row for start, size in parts for row in range(start, start + size)]
    sizes = [size for _, size in parts]
    assert taken == list(range(n))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes == [len(part) for part in np.array_split(np.arange(n), num_replicas)]


def test_tensors_give_the_same_rows_as_ints():
    layout = Layout(4, 0, 4)
    for n in (0, 2, 5, 8):
        for replica in range(4):
            start, size = layout.rows(tf.constant(n, tf.int64), replica)
            assert (int(start), int(size)) == layout.rows(n, replica)


@pytest.mark.parametrize("values", [(2, 2, 1), (2, -1, 1), (2, 0, 3), (2, 0, 0)])
def test_replicas_outside_the_job_are_refused(values):
    with pytest.raises(UsageError, match="Layout: replicas"):
        Layout(*values)


def test_rows_of_every_kind_of_leaf():
    dense = np.arange(12).reshape(4, 3)
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense(dense)
    data = {"dense": tf.constant(dense), "ragged": ragged, "sparse": sparse}
    assert all(int(num_rows(leaf)) == 4 for leaf in data.values())
    part = slice_rows(data, 1, 2)
    np.testing.assert_array_equal(part["dense"], dense[1:3])
    assert part["ragged"].to_list() == [[2, 3], []]
    np.testing.assert_array_equal(tf.sparse.to_dense(part["sparse"]), dense[1:3])


def test_dummy_rows_fit_their_spec():
    specs = (
        tf.TensorSpec([None, 3]),
        tf.TensorSpec([None], tf.string),
        tf.RaggedTensorSpec([None, None, 2], tf.float32, ragged_rank=1),
        tf.RaggedTensorSpec([None, None, None], tf.int32, ragged_rank=2),
        tf.SparseTensorSpec([None, 5], tf.float32),
    )
    for spec, rows in zip(specs, zero_rows(specs), strict=True):
        assert spec.is_compatible_with(rows), spec
        assert int(num_rows(rows)) == 1
