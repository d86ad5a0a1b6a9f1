"""What a step will take at sizes that were not measured."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize

from tfdist.scaling.sizes import Size

_RESAMPLES = 200
_PERCENTILES = (5.0, 95.0)
_LEAST_SPREAD = 0.02  # of a step: what one machine differs from itself between two runs


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step at a size that was not measured.

    Attributes:
        replicas: the size.
        step_ms: what it will take.
        low_ms: the lower end of the interval that 90% of resamples lie in.
        high_ms: its upper end.
    """

    replicas: int
    step_ms: float
    low_ms: float
    high_ms: float


def predict(sizes: Sequence[Size], targets: Sequence[int], sharing: Callable[[int], float]) -> list[Prediction]:
    """Predicts the step at the numbers of replicas in `targets`.

    A step is what a replica does by itself, plus what the replicas cost one another. The first is known from the runs
    without communication (or, without these, from what is no communication in the others): a part that shrinks with
    the share of the batch, and a part that does not. The second grows with the number of replicas and, through the
    latency of messages, with how many share a core. The factors are found by least squares, none below zero; the
    interval comes from drawing the repetitions anew.

    Args:
        sizes: measured ones of one mode, two at least.
        targets: the sizes to predict.
        sharing: says how many replicas share the busiest device at a size.
    """
    if len(sizes) < 2:
        return []
    generator = np.random.default_rng(0)
    strong = sizes[0].mode != "weak"
    best = _curve([(s.replicas, s.step_ms, _alone(s)) for s in sizes], sharing, strong)
    drawn = []
    for _ in range(_RESAMPLES):
        points = []
        for size in sizes:
            step = float(np.median(generator.choice(size.all_step_ms, len(size.all_step_ms))))
            points.append((size.replicas, step, min(_alone(size, generator), step)))
        drawn.append(_curve(points, sharing, strong))
    predictions = []
    for target in targets:
        center = best(target)
        low, high = np.percentile([curve(target) for curve in drawn], _PERCENTILES)
        low, high = (min(low, center * (1 - _LEAST_SPREAD)), max(high, center * (1 + _LEAST_SPREAD)))
        predictions.append(Prediction(target, center, float(low), float(high)))
    return predictions


def _alone(size: Size, generator: "np.random.Generator | None" = None) -> float:
    """Returns what a step takes without the others, in milliseconds."""
    if not size.ceiling_ms:
        return size.step_ms - (size.anatomy()["communication"] if size.replicas > 1 else 0.0)
    values = size.ceiling_ms if generator is None else generator.choice(size.ceiling_ms, len(size.ceiling_ms))
    return min(float(np.median(values)), size.step_ms)


def _curve(
    points: Sequence[tuple[int, float, float]], sharing: Callable[[int], float], strong: bool
) -> Callable[[int], float]:
    """Returns the step at a size, from (replicas, milliseconds, milliseconds alone) of others."""

    def alone(n: int) -> list[float]:
        return [sharing(n) / n, sharing(n)] if strong else [sharing(n)]

    def together(n: int) -> list[float]:
        if n == 1:
            return [0.0, 0.0]
        return [(n - 1) / n * sharing(n), (n - 1) * sharing(n)]

    own = _nonnegative([alone(n) for n, _, _ in points], [value for _, _, value in points])
    common = _nonnegative([together(n) for n, _, _ in points], [step - value for _, step, value in points])
    return lambda n: float(np.dot(own, alone(n)) + np.dot(common, together(n)))


def _nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    weights = 1.0 / np.maximum(np.abs(values), 1e-3 * max(map(abs, values)) + 1e-9)
    return optimize.nnls(np.asarray(rows) * weights[:, None], np.asarray(values) * weights)[0]
