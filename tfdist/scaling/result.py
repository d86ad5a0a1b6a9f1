"""The result of a sweep: measurements, laws, predictions, causes."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.scaling.causes import Diagnosis, diagnose
from tfdist.scaling.laws import AlphaBeta, Law, fit, fit_alpha_beta
from tfdist.scaling.predict import Prediction, predict
from tfdist.scaling.sizes import Size


@dataclasses.dataclass(frozen=True)
class ModeResult:
    """What was found in one mode.

    Attributes:
        mode: "strong", "weak" or "given".
        sizes: measured ones, ascending.
        speedups: of each over one replica, by throughput; a smallest size of more than one counts as ideal.
        laws: that fit.
        predictions: for sizes that were not measured.
        hindsight: for each size but the first two, what the smaller ones would have predicted.
        diagnoses: for each size, ascending.
    """

    mode: str
    sizes: tuple[Size, ...]
    speedups: tuple[float, ...]
    laws: tuple[Law, ...]
    predictions: tuple[Prediction, ...]
    hindsight: tuple[Prediction, ...]
    diagnoses: tuple[Diagnosis, ...]

    @property
    def labels(self) -> list[str]:
        """What the sizes are called: by their replicas, or runs by letters."""
        if self.mode != "given":
            return [str(size.replicas) for size in self.sizes]
        return [chr(65 + i % 26) for i in range(len(self.sizes))]

    @property
    def efficiencies(self) -> tuple[float, ...]:
        """Speed-up over number of replicas."""
        return tuple(s / size.replicas for s, size in zip(self.speedups, self.sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class Result:
    """All that the report shows.

    Attributes:
        title: of the report.
        modes: results, strong first.
        link: latency and bandwidth fitted over all sizes; None without any.
        failures: what did not run, and why.
        notes: what has to be known to read the figures.
        provenance: where the figures come from.
        made: when.
    """

    title: str
    modes: tuple[ModeResult, ...]
    link: AlphaBeta | None
    failures: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    provenance: Mapping[str, Any]
    made: str

    @property
    def headline(self) -> str:
        """The result in one sentence: what holds the largest size up."""
        return self.modes[0].diagnoses[-1].headline

    def as_dict(self) -> dict[str, Any]:
        """Returns what report.json holds."""
        return {"headline": self.headline, **dataclasses.asdict(self)}


def analyse(
    sizes: Sequence[Size],
    *,
    title: str,
    sharing: Callable[[int], float] = lambda replicas: 1.0,
    targets: Sequence[int] = (),
    failures: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> Result:
    """Returns the result of measured sizes.

    Args:
        sizes: at least one.
        title: of the report.
        sharing: says how many replicas share the busiest device at a size.
        targets: sizes to predict; by default twice and four times the largest.
        failures: names of runs that failed, and why.
        notes: what has to be known to read the figures.
    """
    modes = []
    for mode in dict.fromkeys(size.mode for size in sizes):
        modes.append(_mode(mode, [size for size in sizes if size.mode == mode], sharing, targets))
    links = {size.replicas: size.link for size in sizes if size.link is not None}
    return Result(
        title=title,
        modes=tuple(modes),
        link=fit_alpha_beta(links),
        failures=tuple(failures),
        notes=tuple(notes),
        provenance=sizes[-1].runs[0].provenance,
        made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def _mode(mode: str, sizes: Sequence[Size], sharing: Callable[[int], float], targets: Sequence[int]) -> ModeResult:
    smallest, largest = sizes[0], sizes[-1]
    base = smallest.examples_per_second / smallest.replicas
    speedups = tuple(size.examples_per_second / base for size in sizes)
    replicas = [size.replicas for size in sizes]
    several = len(set(replicas)) > 1
    names = (["gustafson"] if mode == "weak" else ["amdahl"]) + (["usl"] if len(set(replicas)) > 2 else [])
    wanted = [n for n in (targets or (2 * largest.replicas, 4 * largest.replicas)) if n not in replicas]
    hindsight = [predict(sizes[:i], [sizes[i].replicas], sharing) for i in range(2, len(sizes))]
    return ModeResult(
        mode=mode,
        sizes=tuple(sizes),
        speedups=speedups,
        laws=tuple(fit(name, replicas, speedups) for name in names) if several else (),
        predictions=tuple(predict(sizes, wanted, sharing)) if several else (),
        hindsight=tuple(prediction for found in hindsight for prediction in found),
        diagnoses=tuple(diagnose(size, smallest if several else None, sharing(size.replicas)) for size in sizes),
    )
