"""Predictions: figures made with known parts come out again; the interval holds the repetitions' spread."""

import pytest

from tfdist.scaling.predict import predict


def test_strong_scaling_with_a_latency(make_size):
    def size(n):
        alone, wait = 80 / n + 4, 0.0 if n == 1 else 3 * (n - 1)
        return make_size([(0, alone, wait, 0)] * n, ceiling=alone, spread=0.05)

    for found in predict([size(n) for n in (1, 2, 3)], [4, 8], lambda n: 1.0):
        expected = 80 / found.replicas + 4 + 3 * (found.replicas - 1)
        assert found.step_ms == pytest.approx(expected, rel=0.02)
        assert found.low_ms < expected < found.high_ms and found.high_ms - found.low_ms >= 0.03 * expected


def test_weak_scaling(make_size):
    sizes = [make_size([(0, 50, 2.0 * (n - 1), 0)] * n, mode="weak", ceiling=50) for n in (1, 2, 4)]
    assert predict(sizes, [8], lambda n: 1.0)[0].step_ms == pytest.approx(64, rel=0.02)


def test_cores_that_are_shared(make_size):
    def sharing(n):
        return float(-(-n // 2))

    sizes = [make_size([(0, 60 / n * sharing(n), 0, 0)] * n, ceiling=60 / n * sharing(n)) for n in (1, 2, 3)]
    assert predict(sizes, [4], sharing)[0].step_ms == pytest.approx(30, rel=0.02)


def test_one_size_predicts_nothing(make_size):
    assert predict([make_size([(0, 10, 0, 0)])], [2], lambda n: 1.0) == []
