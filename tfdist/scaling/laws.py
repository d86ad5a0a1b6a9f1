"""Scaling laws: fits to measured throughput, and the link's latency and bandwidth."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize

_TINY = 1e-12


@dataclasses.dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        name: which.
        parameters: by name.
        about: what they mean, in words.
        error: root mean square of the relative differences from what was measured.
    """

    name: str
    parameters: Mapping[str, float]
    about: str
    error: float

    def speedup(self, replicas: float) -> float:
        """Returns the speed-up over one replica that the law gives."""
        return float(_FORMULAS[self.name](np.asarray(replicas, float), *self.parameters.values()))


def fit(name: str, replicas: Sequence[float], speedups: Sequence[float]) -> Law:
    """Fits one law by least squares of relative differences.

    Args:
        name: "amdahl" (strong scaling: S = 1 / (s + (1 - s) / N), Amdahl 1967), "gustafson" (weak scaling:
            S = N - s (N - 1), Gustafson 1988), or "usl" (S = N / (1 + sigma (N - 1) + kappa N (N - 1)), Gunther 2007).
        replicas: sizes.
        speedups: of each, over one replica.
    """
    n, measured = np.asarray(replicas, float), np.asarray(speedups, float)
    formula = _FORMULAS[name]
    names, most, about = _PARAMETERS[name]

    def differences(values: np.ndarray) -> np.ndarray:
        return formula(n, *values) / measured - 1.0

    found = optimize.least_squares(differences, [min(0.05, top / 2) for top in most], bounds=(0.0, most))
    values = [float(v) for v in found.x]
    error = float(np.sqrt(np.mean(differences(found.x) ** 2)))
    return Law(name, dict(zip(names, values, strict=True)), about.format(*values), error)


@dataclasses.dataclass(frozen=True)
class AlphaBeta:
    """What an all-reduce costs: 2 (N - 1) alpha + 2 (N - 1) / N bytes / beta, as in a ring.

    Reference: Thakur et al., Optimization of collective communication operations in MPICH, 2005.

    Attributes:
        alpha_s: latency of one message.
        beta_bytes_per_second: bandwidth of the link.
    """

    alpha_s: float
    beta_bytes_per_second: float

    def seconds(self, replicas: int, size: float) -> float:
        """Returns the time of an all-reduce of `size` bytes."""
        steps = 2 * (replicas - 1)
        return steps * self.alpha_s + steps / replicas * size / self.beta_bytes_per_second


def fit_alpha_beta(links: Mapping[int, Mapping[str, float]]) -> AlphaBeta | None:
    """Fits what was measured at several numbers of replicas; None without any.

    Args:
        links: by number of replicas, latency and bytes per second of an all-reduce.
    """
    if not links:
        return None
    steps = {n: 2 * (n - 1) for n in links}
    alpha = float(np.median([link["latency_s"] / steps[n] for n, link in links.items()]))
    beta = float(np.median([link["bytes_per_second"] * steps[n] / n for n, link in links.items()]))
    return AlphaBeta(alpha, beta)


def _amdahl(n: np.ndarray, serial: float) -> np.ndarray:
    return 1.0 / (serial + (1.0 - serial) / n)


def _gustafson(n: np.ndarray, serial: float) -> np.ndarray:
    return np.maximum(n - serial * (n - 1.0), _TINY)


def _usl(n: np.ndarray, contention: float, coherency: float) -> np.ndarray:
    return n / (1.0 + contention * (n - 1.0) + coherency * n * (n - 1.0))


_FORMULAS: Mapping[str, Callable[..., np.ndarray]] = {"amdahl": _amdahl, "gustafson": _gustafson, "usl": _usl}
_PARAMETERS = {
    "amdahl": (("serial",), (1.0,), "{0:.1%} of the work of one replica does not get faster with more"),
    "gustafson": (("serial",), (1.0,), "{0:.1%} of the time is lost for each further replica"),
    "usl": (
        ("contention", "coherency"),
        (10.0, 10.0),
        "contention {0:.3f} (queueing for something shared), coherency {1:.4f} (talk between all pairs)",
    ),
}
