"""The audit of who reads what: what it says of sound data, and of planted faults."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource, BatchSource, audit
from tfdist.errors import UsageError


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


@pytest.mark.parametrize(("workers", "replicas"), [(1, 1), (2, 1), (3, 1), (2, 2), (7, 1)])
def test_examples_are_read_once(workers, replicas):
    report = audit(
        ArraySource((np.arange(101.0), np.arange(101)), batch_size=10), workers=workers, replicas_per_worker=replicas
    )
    assert report.ok and report.num_examples == 101
    assert sum(share.examples for share in report.workers) == 101
    assert sum(share.share for share in report.workers) == pytest.approx(1)
    assert {share.steps for share in report.workers} == {11}


def test_shares_of_uneven_batches_and_the_table():
    report = audit(tf.data.Dataset.range(13).batch(5), workers=2)
    assert [share.examples for share in report.workers] == [3 + 3 + 2, 2 + 2 + 1]
    assert str(report).splitlines() == [
        "worker  examples   share  steps",
        "     0         8   61.5%      3",
        "     1         5   38.5%      3",
        "13 examples: 0 dropped, 0 read twice",
        "ok",
    ]


def test_equal_examples_are_counted():
    report = audit((np.zeros(9, np.float32), np.zeros(9, np.float32)), workers=2)
    assert report.ok and report.num_examples == 9


def test_strings_ragged_and_sparse_rows_are_told_apart():
    data = {
        "words": tf.constant(["a", "b", "a", "c"]),
        "ragged": tf.ragged.constant([[1], [1, 2], [], [1]]),
    }
    assert audit(tf.data.Dataset.from_tensor_slices(data).batch(3), workers=2).ok
    sparse = tf.sparse.from_dense(np.eye(5, dtype="float32"))
    assert audit(tf.data.Dataset.from_tensor_slices(sparse).batch(2), workers=2).ok


def test_a_pipeline_with_another_order_at_each_reading_is_named():
    rng = np.random.default_rng(0)

    def rows():
        yield from rng.permutation(40)

    data = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int64)).batch(8)
    report = audit(data, workers=2)
    assert not report.ok and report.dropped and report.read_twice
    assert "another order each time it is read" in str(report)


def test_a_worker_that_drops_and_one_that_reads_twice_are_found():
    """The second worker's stream lacks its last batch and has the first one twice."""
    readings = iter((0, 0, 1))

    def make():
        batches = tf.data.Dataset.range(12).batch(4)
        return batches if next(readings) == 0 else batches.take(1).repeat(2).concatenate(batches.skip(1).take(1))

    report = audit(BatchSource(make), workers=2)
    assert not report.ok
    assert (report.dropped, report.read_twice) == (2, 2)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (lambda: tf.data.Dataset.range(4).batch(2), {"workers": 0}, "workers=0"),
        (lambda: tf.data.Dataset.range(4).batch(2), {"workers": 2.0}, "workers=2.0"),
        (lambda: tf.data.Dataset.range(4).batch(2), {"replicas_per_worker": True}, "replicas_per_worker=True"),
        (lambda: BatchSource(lambda: None, infinite=True, steps=1), {}, "give a finite dataset"),
        (lambda: (np.zeros((2, 1)) for _ in range(3)), {}, "that can be read again"),
    ],
)
def test_wrong_use_is_refused(data, options, words):
    with pytest.raises(UsageError, match=words):
        audit(data(), **options)
