"""What one training run is asked to do: frozen dataclasses that check themselves, without TensorFlow.

Each check raises UsageError with the flag, its value, what is allowed and the fix. Which hooks, models and data
exist is known to the rooms that have them; they check those names.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.mpi import require_mpi
from tfdist.errors import UsageError
from tfdist.liveness.judge import Limits

STRATEGIES = ("one_device", "mirrored", "multi_worker", "auto")
LOOPS = ("fit", "custom")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
TRANSPORTS = ("auto", "collective", "mpi")
RESUMES = ("auto", "never", "must")
ON_SAVE_ERROR = ("stop", "continue")
OPTIMIZERS = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "adamax",
    "nadam",
    "rmsprop",
    "adagrad",
    "adadelta",
    "adafactor",
    "ftrl",
    "lamb",
    "lion",
)
_LARGEST_SEED = 2**32 - 1  # NumPy's
_MOST_TRACED = 10_000  # steps; a viewer has to hold them all


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """Where to train.

    Attributes:
        strategy: One of STRATEGIES.
        num_devices: Devices of this process; None takes what there is.
        start_timeout: Seconds to wait for the other workers.
        hang_timeout: Seconds after which a worker counts as hung; None takes what the launcher says, or 30.
    """

    strategy: str = "auto"
    num_devices: int | None = None
    start_timeout: float = 120.0
    hang_timeout: float | None = None

    def __post_init__(self) -> None:
        _one_of("--strategy", self.strategy, STRATEGIES)
        _whole("--num_devices", self.num_devices, least=1, optional=True)
        _above_zero("--start_timeout", self.start_timeout, "of seconds")
        if self.hang_timeout is not None:
            try:
                Limits(self.hang_timeout)
            except UsageError as error:
                raise UsageError(f"--{error}") from None
        if self.strategy == "one_device" and (self.num_devices or 1) > 1:
            raise UsageError(
                f"--num_devices={self.num_devices}: --strategy=one_device has one device; "
                "leave --num_devices out, or use --strategy=mirrored"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What to train.

    Attributes:
        name: A built-in model or `package.module:function`.
        sizes: Arguments of the function that builds it.
    """

    name: str
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError(
                "--model is missing: give a built-in model, such as --model=digits_cnn, or "
                "--model=package.module:function"
            )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on.

    Attributes:
        spec: A built-in source such as `digits` or `bytes:PATH`, or `package.module:function`.
        global_batch_size: Examples of a step, over all replicas.
    """

    spec: str
    global_batch_size: int = 64

    def __post_init__(self) -> None:
        if not self.spec:
            raise UsageError(
                "--data is missing: give built-in data, such as --data=digits or --data=bytes:PATH, or "
                "--data=package.module:function"
            )
        _whole("--global_batch_size", self.global_batch_size, least=1)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long to train, and by which loop.

    Attributes:
        kind: One of LOOPS.
        epochs: Passes over the data. None where `steps` is given; else 1.
        steps: Steps in all, or None.
        steps_per_loop: Steps in one call of the compiled loop.
    """

    kind: str = "fit"
    epochs: int | None = None
    steps: int | None = None
    steps_per_loop: int = 1

    def __post_init__(self) -> None:
        _one_of("--loop", self.kind, LOOPS)
        _whole("--epochs", self.epochs, least=1, optional=True)
        _whole("--steps", self.steps, least=1, optional=True)
        _whole("--steps_per_loop", self.steps_per_loop, least=1)
        if self.epochs is not None and self.steps is not None:
            raise UsageError(
                f"--epochs={self.epochs} and --steps={self.steps}: both say how long to train; leave one out"
            )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How weights follow gradients.

    Attributes:
        name: One of OPTIMIZERS.
        learning_rate: None takes the optimizer's own default.
        warmup_steps: Steps over which the learning rate rises to its value.
    """

    name: str = "adam"
    learning_rate: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _one_of("--optimizer", self.name, OPTIMIZERS)
        if self.learning_rate is not None:
            _above_zero("--learning_rate", self.learning_rate)
        _whole("--warmup_steps", self.warmup_steps, least=0)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What happens in one step.

    Attributes:
        precision: One of PRECISIONS; a Keras dtype policy.
        hook: Spec of the hook that aggregates gradients; None is the exact all-reduce.
        transport: One of TRANSPORTS.
        accumulate_steps: Micro-batches of a step.
        clip_global_norm: Largest norm of the aggregated gradients, or None.
        jit_compile: Whether XLA compiles the forward and the backward pass.
    """

    precision: str = "float32"
    hook: str | None = None
    transport: str = "auto"
    accumulate_steps: int = 1
    clip_global_norm: float | None = None
    jit_compile: bool = False

    def __post_init__(self) -> None:
        _one_of("--precision", self.precision, PRECISIONS)
        _one_of("--transport", self.transport, TRANSPORTS)
        if self.transport == "mpi":
            try:
                require_mpi()
            except UsageError as error:
                raise UsageError(f"--{error}") from None
        _whole("--accumulate_steps", self.accumulate_steps, least=1)
        if self.clip_global_norm is not None:
            _above_zero("--clip_global_norm", self.clip_global_norm)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """What is written, and what is continued.

    Attributes:
        log_dir: Folder of the TensorBoard log, or None.
        checkpoint_dir: Folder of the checkpoints, or None.
        checkpoint_every: Steps between checkpoints; None saves after each epoch (fit) or at the end (custom).
        keep_checkpoints: How many stay.
        resume: One of RESUMES.
        on_save_error: One of ON_SAVE_ERROR.
        async_save: Whether training goes on while a checkpoint is written.
        summary_json: File of the run's figures, or None.
        trace_steps: FIRST:END, the steps of which a Chrome trace is written into log_dir, or None.
        profile: Whether TensorFlow's profiler runs over these steps as well.
    """

    log_dir: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    resume: str = "auto"
    on_save_error: str = "stop"
    async_save: bool = True
    summary_json: str | None = None
    trace_steps: str | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        _one_of("--resume", self.resume, RESUMES)
        _one_of("--on_save_error", self.on_save_error, ON_SAVE_ERROR)
        _whole("--checkpoint_every", self.checkpoint_every, least=1, optional=True)
        _whole("--keep_checkpoints", self.keep_checkpoints, least=1)
        if self.checkpoint_dir is None:
            for flag, given in (
                (f"--checkpoint_every={self.checkpoint_every}", self.checkpoint_every is not None),
                ("--resume=must", self.resume == "must"),
            ):
                if given:
                    raise UsageError(f"{flag} needs a folder of checkpoints: give --checkpoint_dir=DIR")
        for flag, path in (("--log_dir", self.log_dir), ("--checkpoint_dir", self.checkpoint_dir)):
            _can_be_made(flag, path, folder=path)
        if self.trace_steps is not None:
            parse_steps(self.trace_steps)
            if self.log_dir is None:
                raise UsageError(f"--trace_steps={self.trace_steps} needs a folder to write to: give --log_dir=DIR")
        elif self.profile:
            raise UsageError("--profile needs a range of steps: give --trace_steps=FIRST:END, such as 100:110")
        path = self.summary_json
        if path is not None and (not path or path.endswith("/") or os.path.isdir(path)):
            raise UsageError(f"--summary_json={path!r}: a file is needed, such as runs/summary.json")
        _can_be_made("--summary_json", path, folder=path and os.path.dirname(os.path.abspath(path)))


def _can_be_made(flag: str, value: "str | None", *, folder: "str | None") -> None:
    """Raises UsageError where the folder that a flag needs can be none."""
    if folder is None:
        return
    if not folder:
        raise UsageError(f"{flag}={value!r}: a folder is needed, new or existing")
    here = Path(folder).absolute()
    there = next(path for path in (here, *here.parents) if os.path.exists(path))
    if not there.is_dir():
        raise UsageError(f"{flag}={value!r}: a folder is needed, and {there} is a file; choose another path")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All that `scripts/train.py` is asked to do.

    Attributes:
        devices: Where to train.
        model: What to train.
        data: What to train on.
        loop: How long, and by which loop.
        optimizer: How weights follow gradients.
        step: What happens in one step.
        output: What is written, and what is continued.
        seed: Makes runs repeat; None draws one.
    """

    devices: DeviceConfig
    model: ModelConfig
    data: DataConfig
    loop: LoopConfig
    optimizer: OptimizerConfig
    step: StepConfig
    output: OutputConfig
    seed: int | None = None

    def __post_init__(self) -> None:
        _whole("--seed", self.seed, least=0, most=_LARGEST_SEED, optional=True)


def did_you_mean(value: str, choices: Sequence[str]) -> str:
    """Returns "; did you mean 'x'?" for the choice nearest to `value`, or nothing."""
    close = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_steps(text: str) -> tuple[int, int]:
    """Returns the first step and the one to end before, of FIRST:END.

    Raises:
        UsageError: If it is not such a range.
    """
    parts = text.split(":")
    steps = tuple(int(part) if part.isdecimal() else part for part in parts)
    require_steps("--trace_steps", steps if len(parts) == 2 else text)
    return steps


def require_steps(name: str, steps: Any) -> None:
    """Checks a range of steps: the first, from 1, and the one to end before.

    Raises:
        UsageError: If it is none, or has more than 10,000 steps; it names `name`.
    """
    try:
        first, end = steps
        right = isinstance(first, int) and isinstance(end, int) and 1 <= first < end <= first + _MOST_TRACED
    except (TypeError, ValueError):
        right = False
    if not right:
        raise UsageError(
            f"{name}={steps!r}: a first step from 1 and the step to end before are needed, at most {_MOST_TRACED:,} "
            "steps, such as 100 and 110 (--trace_steps=100:110)"
        )


def parse_sizes(text: str) -> dict[str, Any]:
    """Returns the arguments in a string such as "width=64,dropout=0.1,image_shape=8x8x1,tied=true".

    Args:
        text: Pairs name=value, separated by commas; a value is an integer, a number, true, false, integers joined by
            "x", or else a word.

    Raises:
        UsageError: If it is not made of such pairs.
    """
    sizes: dict[str, Any] = {}
    for pair in text.split(",") if text.strip() else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise UsageError(f"--model_config={text!r}: {pair!r} is no name=value; write width=64,depth=2")
        if name in sizes:
            raise UsageError(f"--model_config={text!r}: {name} is given twice; leave one out")
        sizes[name] = _value(value)
    return sizes


def _value(text: str) -> Any:
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    parts = text.split("x")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else text


def _one_of(flag: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{flag}={value!r}: choose one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def _whole(flag: str, value: Any, *, least: int, most: int | None = None, optional: bool = False) -> None:
    if value is None and optional:
        return
    right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not right or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{flag}={value!r}: an integer {allowed} is needed")


def _above_zero(flag: str, value: Any, what: str = "") -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{flag}={value!r}: a finite number{' ' + what if what else ''} above 0 is needed")
