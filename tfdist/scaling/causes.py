"""What holds a job up, and what to change."""

import dataclasses
import statistics

from tfdist.scaling.sizes import Size

_WORTH_NAMING = 0.10  # of a step
_SUSTAINED = 0.05  # of a step: waiting for input that is no noise
_BF16_RATIO = 2.0
_POWERSGD_RATIO = 8.0  # of rank 4 for the reference models, see docs/benchmarks.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """Something that makes steps longer.

    Attributes:
        kind: "input", "communication", "straggler", "serial", "overhead" or "compute".
        lost_ms: by how much it makes a step longer.
        amount_ms: what it takes itself: a batch of the pipeline, the exposed communication, the work of one worker
            that the others do not have.
        share: of the step.
        worker: the one that is behind, for a straggler.
        slowdown: how many times longer it needs than the others, for a straggler.
        finding: what was found, in one sentence.
        advice: the one change that helps most, and what it would save.
    """

    kind: str
    lost_ms: float
    amount_ms: float
    share: float
    finding: str
    advice: str
    worker: int | None = None
    slowdown: float | None = None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was found at one size.

    Attributes:
        mode: of the size.
        replicas: of the size.
        step_ms: of the size.
        causes: the largest first; empty where the job scales well.
    """

    mode: str
    replicas: int
    step_ms: float
    causes: tuple[Cause, ...]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if not self.causes:
            return f"scales well: at {self.replicas} replicas nothing takes {_WORTH_NAMING:.0%} of a step or more"
        return self.causes[0].finding


def diagnose(size: Size, smallest: "Size | None" = None, sharing: float = 1.0) -> Diagnosis:
    """Says what makes the steps of `size` longer than they have to be.

    What the slowest worker does by itself is what all wait for. Its own waiting is the communication that all have;
    what the others wait for beyond that is its lag.

    Args:
        size: the measured size.
        smallest: the smallest size of the sweep; with it, compute that does not shrink (strong scaling) or that grows
            (weak scaling) is seen.
        sharing: how many replicas share the busiest device.
    """
    step = max(worker.step_ms for worker in size.workers)
    smaller = smallest is not None and smallest.replicas < size.replicas
    starved = _all_wait_for_input(size, step) or (smaller and _input_is_short(smallest))
    causes = [_input(size, step, starved), _overhead(size, step)]
    causes += [_communication(size, step), _straggler(size, step, starved)]
    if smaller:
        causes.append(_compute(size, smallest, step, sharing))
    named = sorted((c for c in causes if c is not None and c.share >= _WORTH_NAMING), key=lambda c: -c.lost_ms)
    return Diagnosis(size.mode, size.replicas, size.step_ms, tuple(named))


def _common(size: Size, part: str) -> float:
    """Returns what a part takes on all workers: on the one where it is shortest."""
    return min(worker.part(part) for worker in size.workers)


def _all_wait_for_input(size: Size, step: float) -> bool:
    """Whether the pipelines of all workers are too slow.

    Pipelines read ahead. A worker that still waits for its input, though it has also waited for another worker, could
    not go any faster than that one.
    """
    return _common(size, "input") >= _SUSTAINED * step


def _input_is_short(size: Size) -> bool:
    """Whether steps wait for input.

    Pipelines that are too slow for one replica are so for each of many. The fastest of them then runs ahead little by
    little until it waits no longer, and looks as if only the others were slow.
    """
    return size.anatomy()["input"] >= _WORTH_NAMING * size.step_ms


def _input(size: Size, step: float, starved: bool) -> Cause:
    lost = _common(size, "input")
    if starved:
        lost = max(worker.input_ms for worker in size.workers)
    return Cause(
        kind="input",
        lost_ms=lost,
        amount_ms=step,
        share=lost / step,
        finding=(
            f"input-bound: {lost / step:.0%} of each step ({lost:.1f} ms) waits for data; "
            f"the pipeline needs {step:.1f} ms for a batch"
        ),
        advice=(
            f"make the pipeline faster (map with num_parallel_calls, cache, more files, prefetch): "
            f"up to {lost / step:.0%} of a step"
        ),
    )


def _overhead(size: Size, step: float) -> Cause:
    lost = _common(size, "overhead")
    return Cause(
        kind="overhead",
        lost_ms=lost,
        amount_ms=lost,
        share=lost / step,
        finding=(
            f"overhead-bound: {lost / step:.0%} of each step ({lost:.1f} ms) is Python between the steps, "
            "such as callbacks"
        ),
        advice=(
            "run more steps in one call of the compiled loop (--steps_per_loop=20 saves an estimated "
            f"{0.95 * lost / step:.0%}), and keep callbacks short"
        ),
    )


def _communication(size: Size, step: float) -> Cause | None:
    if size.replicas == 1:
        return None
    lost = size.workers[size.slowest].communication_ms
    speed = ""
    if size.bandwidth is not None and size.bytes_per_step:
        speed = f": {size.bytes_per_step / 1e6:.1f} MB a step over a link of {8e-6 * size.bandwidth:,.0f} Mbit/s"
    if size.ceiling_ms:
        speed += f"; without communication a step takes {statistics.median(size.ceiling_ms):.1f} ms"
    return Cause(
        kind="communication",
        lost_ms=lost,
        amount_ms=lost,
        share=lost / step,
        finding=f"communication-bound: {lost / step:.0%} of each step ({lost:.1f} ms) is exposed communication{speed}",
        advice=_better_hook(size, lost, step),
    )


def _better_hook(size: Size, lost: float, step: float) -> str:
    """Says which hook would save how much: fewer bytes first shorten what is not hidden."""
    wire = lost
    if size.bandwidth is not None and size.bytes_per_step:
        wire = 1e3 * size.bytes_per_step / size.bandwidth

    def saved(ratio: float) -> float:
        return min(lost, wire * (1.0 - 1.0 / ratio)) / step

    hook = size.runs[0].hook
    if hook == "allreduce" and saved(_POWERSGD_RATIO) > saved(_BF16_RATIO) + 0.05:
        return (
            f"hook=powersgd would save an estimated {saved(_POWERSGD_RATIO):.0%}; hook=bf16, which loses less, "
            f"{saved(_BF16_RATIO):.0%} (docs/hooks.md says what each loses)"
        )
    if hook == "allreduce":
        return f"hook=bf16 would save an estimated {saved(_BF16_RATIO):.0%} (docs/hooks.md says what it loses)"
    return "take a larger batch or accumulate_steps=2, which halves the exchanges for each example"


def _straggler(size: Size, step: float, starved: bool) -> Cause | None:
    if len(size.workers) == 1:
        return None
    slowest = size.slowest
    own = size.workers[slowest]
    others = [worker for i, worker in enumerate(size.workers) if i != slowest]

    def mean(part: str) -> float:
        return statistics.fmean(worker.part(part) for worker in others)

    # Where all wait for input, whoever gets its own a little later than the others is no straggler for that.
    parts = ("compute", "overhead") if starved else ("input", "compute", "overhead")
    lost = sum(own.part(p) - mean(p) for p in parts)
    part = max(parts, key=lambda p: own.part(p) - mean(p))
    excess, slowdown = own.part(part) - mean(part), own.part(part) / max(mean(part), 1e-6)
    if part == "overhead":
        kind = "serial"
        behind = (
            f"worker {slowest}{' (chief)' if slowest == 0 else ''} does {excess:.1f} ms of work between the steps that "
            "the others do not"
        )
        advice = "make what it alone does (callbacks, logging, saving) shorter or rarer, or move it to a thread"
    else:
        kind = "straggler"
        what, advice = {
            "input": ("in reading its input", "look at its disk and its share of the files"),
            "compute": (
                "in compute",
                "look for other processes, a throttled or a different device on it (tfdist doctor)",
            ),
        }[part]
        behind = f"worker {slowest} is {slowdown:.1f}x slower {what} ({excess:.1f} ms)"
    return Cause(
        kind=kind,
        lost_ms=lost,
        amount_ms=excess,
        share=lost / step,
        worker=slowest,
        slowdown=slowdown,
        finding=f"{behind}, and all wait for it: {lost / step:.0%} of each step",
        advice=f"{advice}: up to {lost / step:.0%} of a step",
    )


def _compute(size: Size, smallest: Size, step: float, sharing: float) -> Cause:
    """Compute beyond what the smallest size promises: a batch too small to be cut further, or something shared."""
    before = min(worker.compute_ms for worker in smallest.workers)
    now = _common(size, "compute")
    shrinks = smallest.replicas / size.replicas if size.mode == "strong" else 1.0
    lost = now - before * shrinks
    if sharing > 1:
        finding = f"{sharing:.0f} replicas share one device"
        advice = "take no more replicas than devices"
    elif size.mode == "strong":
        finding = "the share of the batch is too small to keep a replica busy"
        advice = "take a larger global batch (--global_batch_size)"
    else:
        finding = "replicas slow each other down, as where they share memory or cooling"
        advice = "give each replica cores or a device of its own"
    return Cause(
        kind="compute",
        lost_ms=lost,
        amount_ms=lost,
        share=lost / step,
        finding=(
            f"compute takes {lost:.1f} ms ({lost / step:.0%} of each step) more than the runs with "
            f"{smallest.replicas} replica{'s' if smallest.replicas > 1 else ''} promise: {finding}"
        ),
        advice=f"{advice}: up to {lost / step:.0%} of a step",
    )
