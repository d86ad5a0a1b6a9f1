"""Which cause is named first, on figures made by hand.

Each worker is (input, compute, communication, overhead) in ms.
"""

import pytest

from tfdist.scaling.causes import diagnose


@pytest.mark.parametrize(
    ("workers", "kind", "amount", "worker"),
    [
        ([(0, 50, 4, 1), (0, 50, 4, 1)], None, None, None),
        ([(19, 1, 1, 0.5), (19, 1, 1, 0.5)], "input", 21.5, None),
        ([(18, 1, 1, 0.5), (5, 1, 14, 0.5)], "input", 20.5, None),  # the second has waited for the first as well
        ([(18, 1, 1, 0.5), (0.1, 1, 18.9, 0.5)], "straggler", 17.9, 0),
        ([(0, 20, 30, 1), (0, 20, 30, 1)], "communication", 30, None),
        ([(0, 20, 18, 1), (0, 36, 2, 1)], "straggler", 16, 1),
        ([(0, 20, 2, 31), (0, 20, 32, 1)], "serial", 30, 0),
        ([(0, 20, 32, 1), (0, 20, 2, 31)], "serial", 30, 1),
        ([(0, 1, 0.1, 5), (0, 1, 0.1, 5)], "overhead", 5, None),
    ],
)
def test_first_cause(make_size, workers, kind, amount, worker):
    diagnosis = diagnose(make_size(workers))
    if kind is None:
        assert not diagnosis.causes and diagnosis.headline.startswith("scales well")
        return
    first = diagnosis.causes[0]
    assert (first.kind, first.amount_ms, first.worker) == (kind, pytest.approx(amount), worker)
    assert first.finding == diagnosis.headline and first.advice and 0 < first.share < 1
    if worker is not None:
        assert f"worker {worker}" in first.finding


def test_pipelines_that_are_slow_for_one_replica_are_so_for_two(make_size):
    """The second worker has run ahead, and waits no longer."""
    one, two = make_size([(19, 1, 0, 0.5)]), make_size([(18, 1, 1, 0.5), (0.1, 1, 18.9, 0.5)])
    first = diagnose(two, one).causes[0]
    assert first.kind == "input" and first.lost_ms == 18 and first.amount_ms == pytest.approx(20.5)
    fast = diagnose(two, make_size([(0.1, 1, 0, 0.5)])).causes[0]
    assert fast.kind == "straggler" and "in reading its input" in fast.finding


def test_texts(make_size):
    link = {"latency_s": 0.0, "bytes_per_second": 12.5e6}  # of an all-reduce of two: 100 Mbit/s
    cause = diagnose(make_size([(0, 20, 80, 0)] * 2, link=link, ceiling=21.0)).causes[0]
    assert cause.finding.endswith("; without communication a step takes 21.0 ms")
    assert "80% of each step (80.0 ms)" in cause.finding and "1.0 MB a step over a link of 100 Mbit/s" in cause.finding
    # 80 ms on the wire: an eighth of that leaves 10, half of it 40.
    assert "hook=powersgd would save an estimated 70%; hook=bf16, which loses less, 40%" in cause.advice
    slow = diagnose(make_size([(0, 20, 12, 0), (0, 32, 0, 0)])).causes[0]
    assert "worker 1 is 1.6x slower in compute (12.0 ms)" in slow.finding


def test_compute_that_does_not_shrink(make_size):
    one, two = make_size([(0, 40, 0, 1)]), make_size([(0, 35, 1, 1)] * 2)
    first = diagnose(two, one).causes[0]
    assert first.kind == "compute" and first.amount_ms == pytest.approx(15) and "larger global batch" in first.advice
    assert "share one device" in diagnose(two, one, sharing=2.0).causes[0].finding
    weak = diagnose(make_size([(0, 40, 1, 1)] * 2, mode="weak"), make_size([(0, 40, 0, 1)], mode="weak"))
    assert not weak.causes
