"""What the replicas of all workers read: every example once, and the same global batches whatever their number."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.data import ArraySource, Layout, as_source, make_feed
from tfdist.errors import UsageError

JOBS = ((1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (2, 2))
few = settings(max_examples=25, deadline=None)


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


def layouts(workers, replicas):
    """Returns the layout of each worker."""
    return [Layout(workers * replicas, worker * replicas, replicas) for worker in range(workers)]


def global_batches(source, workers, replicas, epoch=0, start_step=0, seed=3):
    """Returns the rows of each step, put together from what every replica of every worker gets."""
    feeds = [make_feed(source, layout, seed=seed) for layout in layouts(workers, replicas)]
    batches = []
    for steps in zip(*[feed.dataset(epoch, start_step) for feed in feeds], strict=True):
        parts = [part for step in steps for part in step]
        totals = {int(total) for _, _, total in parts}
        assert len(totals) == 1, "replicas disagree on the size of the global batch"
        if totals == {0}:
            return batches
        rows = [row for data, count, _ in parts for row in data[0].numpy()[: int(count)]]
        assert len(rows) == totals.pop()
        assert all(len(data[0]) == max(1, int(count)) for data, count, _ in parts)
        sizes = [int(count) for _, count, _ in parts]
        assert max(sizes) - min(sizes) <= 1
        batches.append([float(row) for row in rows])
    raise AssertionError("the steps end, though they have to go on with a total of 0")


def sizes_of(batches):
    return [len(batch) for batch in batches]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@few
@given(n=st.integers(1, 50), batch_size=st.integers(1, 12), job=st.sampled_from(JOBS), drop=st.booleans())
def test_every_example_once_an_epoch(n, batch_size, job, drop):
    source = ArraySource(np.arange(float(n)), batch_size=batch_size, drop_remainder=drop)
    if drop and n < batch_size:
        with pytest.raises(UsageError, match="batch_size"):
            global_batches(source, *job)
        return
    whole = n // batch_size * batch_size if drop else n
    batches = global_batches(source, *job)
    expected = [batch_size] * (n // batch_size) + ([n % batch_size] if n % batch_size and not drop else [])
    assert sizes_of(batches) == expected
    read = flat(batches)
    assert len(read) == len(set(read)) == whole
    assert set(read) <= set(range(n))


@few
@given(n=st.integers(2, 50), batch_size=st.integers(1, 12), epoch=st.integers(0, 3), job=st.sampled_from(JOBS[1:]))
def test_the_number_of_replicas_and_workers_does_not_change_the_global_batches(n, batch_size, epoch, job):
    source = ArraySource(np.arange(float(n)), batch_size=batch_size)
    assert global_batches(source, *job, epoch=epoch) == global_batches(source, 1, 1, epoch=epoch)


def test_epochs_are_shuffled_differently_and_the_same_on_every_run():
    def orders(seed):
        source = ArraySource(np.arange(40.0), batch_size=7)
        return [flat(global_batches(source, 2, 1, epoch=epoch, seed=seed)) for epoch in range(3)]

    first = orders(3)
    assert first == orders(3)
    assert len({tuple(order) for order in first}) == 3
    assert orders(4)[0] != first[0]
    assert all(sorted(order) == list(range(40)) for order in first)


@few
@given(n=st.integers(1, 40), batch_size=st.integers(1, 8), data=st.data(), job=st.sampled_from(JOBS))
def test_an_epoch_goes_on_at_a_position(n, batch_size, data, job):
    source = ArraySource(np.arange(float(n)), batch_size=batch_size)
    whole = global_batches(source, *job, epoch=1)
    step = data.draw(st.integers(0, len(whole) - 1))
    assert global_batches(source, *job, epoch=1, start_step=step) == whole[step:]


@pytest.mark.filterwarnings("ignore:the data has .* batches left")
@few
@given(n=st.integers(1, 40), batch_size=st.integers(1, 8), steps=st.integers(1, 9), job=st.sampled_from(JOBS))
def test_limited_epochs_walk_through_the_examples(n, batch_size, steps, job):
    source = ArraySource(np.arange(float(n)), batch_size=batch_size).with_steps(steps)
    passes = -(-source.steps_per_epoch // steps)
    batches = []
    for epoch in range(passes):
        limited = global_batches(source, *job, epoch=epoch)
        assert len(limited) <= steps
        batches += limited
    assert sorted(flat(batches)) == list(range(n))
    plain = ArraySource(np.arange(float(n)), batch_size=batch_size)
    assert batches == global_batches(plain, *job, epoch=0)
    after = global_batches(source, *job, epoch=passes)
    assert after == global_batches(plain, *job, epoch=1)[:steps]


@few
@given(n=st.integers(1, 40), batch_size=st.integers(1, 8), job=st.sampled_from(JOBS), known=st.booleans())
def test_batches_of_a_dataset_are_dealt_out_as_they_are(n, batch_size, job, known):
    dataset = tf.data.Dataset.range(n).batch(batch_size)
    if not known:
        dataset = dataset.filter(lambda batch: tf.size(batch) > 0)
    source = as_source(dataset)
    assert (source.num_batches is None) != known
    expected = [[float(i) for i in range(n)][k : k + batch_size] for k in range(0, n, batch_size)]
    if not known:
        assert global_batches(source, *job) == expected
        return
    # Nobody asks for more batches than there are, so their end needs no mark.
    found = []
    for steps in zip(*[make_feed(source, layout).dataset(0) for layout in layouts(*job)], strict=True):
        parts = [part for step in steps for part in step]
        found.append([float(row) for data, count, _ in parts for row in data[0].numpy()[: int(count)]])
    assert found == expected


def test_rows_have_a_static_number_where_every_batch_is_full():
    source = ArraySource(np.arange(40.0), batch_size=8)
    for spec in make_feed(source, Layout(4, 0, 2), seed=0).dataset(0).element_spec:
        assert spec[0][0].shape == [2]
    uneven = ArraySource(np.arange(41.0), batch_size=8)
    assert not make_feed(uneven, Layout(4, 0, 2), seed=0).full_batches
    assert not make_feed(source, Layout(3, 0, 3), seed=0).full_batches


def test_the_iterator_goes_on_into_the_next_epoch(strategies):
    strategy = strategies["one_device"]
    source = ArraySource(np.arange(10.0), batch_size=4)
    feed = make_feed(source, strategy, seed=3)
    read, opened = [], []
    for epoch in range(3):
        iterator, steps = feed.begin_epoch(strategy, epoch)
        opened.append(iterator)
        read.append([next(iterator)[0][0][0].numpy().tolist() for _ in range(steps)])
        feed.end_epoch(steps)
    assert opened[0] is opened[1] is opened[2]
    assert read == [global_batches(source, 1, 1, epoch=epoch) for epoch in range(3)]


def test_an_epoch_that_was_left_early_is_not_continued(strategies):
    strategy = strategies["one_device"]
    source = ArraySource(np.arange(10.0), batch_size=4)
    feed = make_feed(source, strategy, seed=3)
    iterator, _ = feed.begin_epoch(strategy, 0)
    next(iterator)
    feed.end_epoch(1)
    again, steps = feed.begin_epoch(strategy, 1)
    read = [next(again)[0][0][0].numpy().tolist() for _ in range(steps)]
    assert read == global_batches(source, 1, 1, epoch=1)


def test_a_batch_smaller_than_the_replicas_is_warned_of(caplog):
    source = ArraySource(np.arange(10.0), batch_size=2)
    with caplog.at_level("WARNING", logger="tfdist"):
        batches = global_batches(source, 4, 1)
    assert sorted(flat(batches)) == list(range(10))
    assert "batch_size=2 is smaller than the 4 replicas" in caplog.text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ArraySource(np.arange(3.0), batch_size=0), "batch_size=0"),
        (lambda: ArraySource(np.arange(3.0), batch_size=True), "batch_size=True"),
        (lambda: ArraySource(np.zeros((0, 2)), batch_size=1), "no examples"),
        (lambda: ArraySource((np.zeros(3), np.zeros(4)), batch_size=1), r"different numbers of rows: \[3, 4\]"),
        (lambda: ArraySource((np.zeros(3), 4), batch_size=1), "type int without rows"),
        (lambda: ArraySource(np.arange(3.0), batch_size=1).with_steps(0), "steps=0"),
        (lambda: as_source(tf.data.Dataset.range(3)), r"add \.batch\(BATCH_SIZE\)"),
        (lambda: as_source(tf.data.Dataset.range(0).batch(2)), "the dataset is empty"),
        (lambda: as_source(tf.data.Dataset.range(3).batch(2).repeat()), "the dataset is infinite"),
        (lambda: as_source("digits"), "x of type str: give arrays"),
        (lambda: make_feed(np.zeros(3), Layout(1, 0, 1)), "ndarray is no source of data"),
    ],
)
def test_wrong_data_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()
