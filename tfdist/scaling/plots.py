"""The plots of the report: figures of matplotlib, as SVG that follows the page's colours, or as PNG."""

import dataclasses
import io

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from tfdist.scaling.result import ModeResult, Result
from tfdist.telemetry.parts import PARTS

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
COLORS = {"input": "#E69F00", "compute": "#0072B2", "communication": "#D55E00", "overhead": "#CC79A7"}
_HATCHES = {"input": "//", "compute": "", "communication": "xx", "overhead": ".."}
_INK = "#010203"  # stands for the colour of the page's text
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tfdist",  # equal figures give equal files
    "font.family": "sans-serif",
    "font.size": 10,
    "hatch.linewidth": 0.6,
    **{name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_SIZE = (4.3, 3.3)  # inches: a phone shows it without shrinking its text


@dataclasses.dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        name: for files and tags.
        title: above it.
        alt: what it shows, in words.
        svg: for the page.
        png: for TensorBoard.
    """

    name: str
    title: str
    alt: str
    svg: str
    png: bytes


def make_plots(result: Result) -> list[Plot]:
    """Returns the plots of all modes."""
    plots = []
    for mode in result.modes:
        several = len(mode.sizes) > 1
        if several and mode.mode != "given":
            plots += [_plot(mode, "speedup", _speedup), _plot(mode, "efficiency", _efficiency)]
        plots.append(_plot(mode, "anatomy", _anatomy))
        if any(len(size.workers) > 1 for size in mode.sizes):
            plots.append(_plot(mode, "stragglers", _stragglers))
        if mode.hindsight:
            plots.append(_plot(mode, "prediction", _prediction))
    return plots


def _plot(mode: ModeResult, name: str, draw: object) -> Plot:
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        title, alt = draw(figure, mode)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(png, format="png", facecolor="white", dpi=120)
    suffix = {"strong": " (strong scaling)", "weak": " (weak scaling)", "given": ""}[mode.mode]
    text = svg.getvalue()[svg.getvalue().index("<svg") :].replace(_INK, "currentColor")
    # Ids of one plot must not be those of another on the same page.
    for mark in ('id="', "url(#", 'href="#'):
        text = text.replace(mark, f"{mark}{mode.mode}-{name}-")
    text = text.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)
    return Plot(f"{mode.mode}-{name}", title + suffix, alt, text, png.getvalue())


def _speedup(figure: Figure, mode: ModeResult) -> tuple[str, str]:
    axes = figure.subplots()
    replicas = np.array([size.replicas for size in mode.sizes])
    targets = [p.replicas for p in mode.predictions]
    grid = np.linspace(replicas[0], max([*replicas, *targets[:1]]), 100)
    axes.plot(grid, grid, "--", color=_INK, linewidth=1, label="ideal")
    base = mode.sizes[0]
    law = mode.laws[-1]
    spread = max(_relative_spread(mode), 0.02)
    curve = np.array([law.speedup(n) for n in grid])
    axes.plot(grid, curve, color=COLORS["compute"], linewidth=1.5, label=law.name)
    axes.fill_between(grid, curve * (1 - spread), curve * (1 + spread), color=COLORS["compute"], alpha=0.2, linewidth=0)
    axes.plot(replicas, mode.speedups, "o", color=COLORS["compute"], label="measured")
    shown = [p for p in mode.predictions if p.replicas <= grid[-1]]
    if shown:
        per_ms = base.replicas * base.step_ms
        scale = [per_ms * (p.replicas / base.replicas if mode.mode == "weak" else 1.0) for p in shown]
        values = [s / p.step_ms for s, p in zip(scale, shown, strict=True)]
        below = [v - s / p.high_ms for v, s, p in zip(values, scale, shown, strict=True)]
        above = [s / p.low_ms - v for v, s, p in zip(values, scale, shown, strict=True)]
        axes.errorbar(
            [p.replicas for p in shown],
            values,
            [below, above],
            fmt="D",
            color=COLORS["communication"],
            label="predicted",
        )
    axes.set(xlabel="replicas", ylabel="speed-up", ylim=(0, None), xticks=[*replicas, *(p.replicas for p in shown)])
    axes.legend(loc="upper left")
    points = ", ".join(f"{n}: {s:.2f}" for n, s in zip(replicas, mode.speedups, strict=True))
    return "Speed-up", f"Speed-up by number of replicas: {points}"


def _efficiency(figure: Figure, mode: ModeResult) -> tuple[str, str]:
    axes = figure.subplots()
    labels = mode.labels
    bars = axes.bar(labels, [100 * e for e in mode.efficiencies], color=COLORS["compute"], width=0.6)
    axes.bar_label(bars, fmt="%.0f%%", color=_INK)
    axes.axhline(100, linestyle="--", color=_INK, linewidth=1)
    axes.set(xlabel="replicas", ylabel="efficiency (%)", ylim=(0, max(115, 112 * max(mode.efficiencies))))
    points = ", ".join(f"{n}: {e:.0%}" for n, e in zip(labels, mode.efficiencies, strict=True))
    return "Efficiency", f"Efficiency by number of replicas: {points}"


def _anatomy(figure: Figure, mode: ModeResult) -> tuple[str, str]:
    axes = figure.subplots()
    labels = mode.labels
    bottom = np.zeros(len(labels))
    for part in PARTS:
        values = np.array([size.anatomy()[part] for size in mode.sizes])
        axes.bar(
            labels,
            values,
            0.6,
            bottom,
            label=part,
            color=COLORS[part],
            hatch=_HATCHES[part],
            edgecolor="white",
            linewidth=0.5,
        )
        bottom += values
    axes.set(xlabel="replicas" if mode.mode != "given" else "run", ylabel="ms of a step", ylim=(0, 1.3 * bottom.max()))
    axes.legend(loc="upper left", ncols=2)
    alt = "; ".join(
        f"{label}: " + ", ".join(f"{part} {value:.1f} ms" for part, value in size.anatomy().items())
        for label, size in zip(labels, mode.sizes, strict=True)
    )
    return "Where a step goes", f"Parts of a step: {alt}"


def _stragglers(figure: Figure, mode: ModeResult) -> tuple[str, str]:
    axes = figure.subplots()
    most = max(len(size.workers) for size in mode.sizes)
    table = np.full((most, len(mode.sizes)), np.nan)
    for column, size in enumerate(mode.sizes):
        least = min(worker.busy_ms for worker in size.workers)
        table[: len(size.workers), column] = [worker.busy_ms / least for worker in size.workers]
    top = max(1.5, np.nanmax(table))
    image = axes.imshow(table, cmap="cividis", vmin=1.0, vmax=top, aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            color = "white" if value < (1 + top) / 2 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
    axes.set(
        xlabel="replicas" if mode.mode != "given" else "run",
        ylabel="worker",
        xticks=range(len(mode.sizes)),
        yticks=range(most),
    )
    axes.set_xticklabels(mode.labels)
    figure.colorbar(image, label="own time / fastest worker's")
    slow = "; ".join(
        f"{label}: worker {size.slowest} is the slowest, {np.nanmax(table[:, i]):.2f} times the fastest"
        for i, (label, size) in enumerate(zip(mode.labels, mode.sizes, strict=True))
        if len(size.workers) > 1
    )
    return "Stragglers", f"Own time of each worker against the fastest: {slow}"


def _prediction(figure: Figure, mode: ModeResult) -> tuple[str, str]:
    axes = figure.subplots()
    measured = [s.step_ms for s in mode.sizes if s.replicas in {p.replicas for p in mode.hindsight}]
    predicted = [p.step_ms for p in mode.hindsight]
    top = 1.15 * max(*measured, *predicted)
    axes.plot([0, top], [0, top], "--", color=_INK, linewidth=1)
    low = [p.step_ms - p.low_ms for p in mode.hindsight]
    high = [p.high_ms - p.step_ms for p in mode.hindsight]
    axes.errorbar(predicted, measured, xerr=[low, high], fmt="o", color=COLORS["compute"])
    for p, value in zip(mode.hindsight, measured, strict=True):
        axes.annotate(f"{p.replicas} replicas", (p.step_ms, value), (6, -12), textcoords="offset points")
    axes.set(xlabel="predicted from smaller sizes (ms)", ylabel="measured (ms)", xlim=(0, top), ylim=(0, top))
    points = ", ".join(
        f"{p.replicas} replicas: {p.step_ms:.1f} ms predicted, {m:.1f} ms measured"
        for p, m in zip(mode.hindsight, measured, strict=True)
    )
    return "Predicted and measured", f"Step time predicted from smaller sizes, and measured: {points}"


def _relative_spread(mode: ModeResult) -> float:
    """Returns half the largest distance between repetitions, relative to their median."""
    return max((max(s.all_step_ms) - min(s.all_step_ms)) / 2 / s.step_ms for s in mode.sizes)
