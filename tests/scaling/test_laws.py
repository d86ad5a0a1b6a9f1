"""Laws give back the parameters that figures were made with, and agree with a computation by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.scaling.laws import fit, fit_alpha_beta

N = [1, 2, 3, 4, 8]


@given(st.floats(0, 1))
def test_amdahl(serial):
    law = fit("amdahl", N, [1 / (serial + (1 - serial) / n) for n in N])
    assert law.parameters["serial"] == pytest.approx(serial, abs=1e-3) and law.error < 1e-3


@given(st.floats(0, 0.9))
def test_gustafson(serial):
    law = fit("gustafson", N, [n - serial * (n - 1) for n in N])
    assert law.parameters["serial"] == pytest.approx(serial, abs=1e-3)


@given(st.floats(0, 0.5), st.floats(0, 0.1))
def test_usl(sigma, kappa):
    law = fit("usl", N, [n / (1 + sigma * (n - 1) + kappa * n * (n - 1)) for n in N])
    assert law.parameters["contention"] == pytest.approx(sigma, abs=1e-2)
    assert law.parameters["coherency"] == pytest.approx(kappa, abs=1e-2)
    assert law.speedup(16) == pytest.approx(16 / (1 + sigma * 15 + kappa * 240), rel=0.05)


def test_amdahl_by_hand():
    law = fit("amdahl", [1, 2], [1.0, 1.6])  # 1 / (s + (1 - s) / 2) = 1.6: s = 0.25
    assert law.parameters["serial"] == pytest.approx(0.25, abs=1e-6)
    assert law.speedup(1e9) == pytest.approx(4.0, rel=1e-4) and "25.0%" in law.about


def test_alpha_beta():
    alpha, beta = 2e-3, 5e7
    links = {n: {"latency_s": 2 * (n - 1) * alpha, "bytes_per_second": beta * n / (2 * (n - 1))} for n in (2, 3, 8)}
    found = fit_alpha_beta(links)
    assert (found.alpha_s, found.beta_bytes_per_second) == pytest.approx((alpha, beta))
    assert found.seconds(4, 1e6) == pytest.approx(6 * alpha + 1.5 * 1e6 / beta)
    assert fit_alpha_beta({}) is None


def test_speedups_that_fall():
    assert fit("amdahl", [1, 2, 4], [1.0, 0.5, 0.3]).parameters["serial"] == pytest.approx(1.0)
    assert np.isfinite(fit("usl", [1, 2, 4], [1.0, 0.5, 0.3]).speedup(8))
