"""Every absl flag, and their one reading into frozen dataclasses. Nothing below this room reads FLAGS."""

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging

from tfdist import config
from tfdist.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_USE, PeerError, SaveError, UsageError
from tfdist.liveness.signals import exit_for_requeue, stop_signals

flags.disclaim_key_flags()  # `--help` then lists the flags as those of the script


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Registers the flags of a training script.

    Args:
        flag_values: Where; by default absl's global FLAGS.
    """

    def text(name: str, default: str | None, about: str, **options: bool) -> None:
        flags.DEFINE_string(name, default, about, flag_values=flag_values, **options)

    def whole(name: str, default: int | None, about: str) -> None:
        flags.DEFINE_integer(name, default, about, flag_values=flag_values)

    def number(name: str, default: float | None, about: str) -> None:
        flags.DEFINE_float(name, default, about, flag_values=flag_values)

    text("strategy", "auto", f"{_choices(config.STRATEGIES)}.")
    whole("num_devices", None, "Devices of this process; without GPUs, logical CPU devices are made.")
    number("start_timeout", 120.0, "Seconds to wait for the other workers.")
    number("hang_timeout", None, "Seconds after which a worker counts as hung; default: the launcher's, or 30.")
    text("model", None, "A built-in model or package.module:function.")
    text("model_config", "", "Sizes of the model, such as width=64,image_shape=8x8x1,tied=true.")
    text("data", None, "digits, bytes:PATH, tfrecord:GLOB, synthetic:... or package.module:function.")
    whole("global_batch_size", 64, "Examples of a step, over all replicas.")
    text("loop", "fit", f"{_choices(config.LOOPS)}: Keras's fit, or TrainLoop.")
    whole("epochs", None, "Passes over the data; 1 where --steps is not given either.")
    whole("steps", None, "Steps in all, instead of --epochs.")
    whole("steps_per_loop", 1, "Steps in one call of the compiled loop.")
    text("optimizer", "adam", f"{_choices(config.OPTIMIZERS)}.")
    number("learning_rate", None, "Default: the optimizer's own.")
    whole("warmup_steps", 0, "Steps over which the learning rate rises from near 0 to its value.")
    text("precision", "float32", f"{_choices(config.PRECISIONS)}.")
    text("hook", None, "How gradients are aggregated, such as allreduce:bucket_mb=4.")
    text("transport", "auto", f"{_choices(config.TRANSPORTS)}.")
    whole("accumulate_steps", 1, "Micro-batches of a step.")
    number("clip_global_norm", None, "Largest norm of the aggregated gradients.")
    flags.DEFINE_boolean(
        "jit_compile", False, "Compile the forward and backward pass with XLA.", flag_values=flag_values
    )
    # absl.logging has a flag of this name, for log files that are written only where a program asks for them.
    text("log_dir", None, "Folder of the TensorBoard log.", allow_override=True)
    text("checkpoint_dir", None, "Folder of the checkpoints; the same for all workers.")
    whole("checkpoint_every", None, "Steps between checkpoints; default: each epoch (fit), the end (custom).")
    whole("keep_checkpoints", 3, "How many checkpoints stay.")
    text("on_save_error", "stop", f"{_choices(config.ON_SAVE_ERROR)}: what to do where a checkpoint cannot be written.")
    text("resume", "auto", f"{_choices(config.RESUMES)}: whether to go on from the newest checkpoint.")
    flags.DEFINE_boolean("async_save", True, "Train on while a checkpoint is written.", flag_values=flag_values)
    whole("seed", None, "Two runs of one configuration with the same seed give the same weights.")
    text("trace_steps", None, "FIRST:END, such as 100:110: steps of which a Chrome trace goes into --log_dir.")
    flags.DEFINE_boolean(
        "profile", False, "Run TensorFlow's profiler over --trace_steps as well.", flag_values=flag_values
    )
    text("summary_json", None, "File in which the chief writes the run's figures.")


def parse(values: flags.FlagValues) -> config.TrainConfig:
    """Returns what the parsed flags ask for.

    Args:
        values: The flags that `define` registered, parsed.

    Raises:
        UsageError: If a flag cannot be right; it names the flag, its value, what is allowed and the fix.
    """
    found = config.TrainConfig(
        devices=config.DeviceConfig(values.strategy, values.num_devices, values.start_timeout, values.hang_timeout),
        model=config.ModelConfig(values.model or "", config.parse_sizes(values.model_config or "")),
        data=config.DataConfig(values.data or "", values.global_batch_size),
        loop=config.LoopConfig(values.loop, values.epochs, values.steps, values.steps_per_loop),
        optimizer=config.OptimizerConfig(values.optimizer, values.learning_rate, values.warmup_steps),
        step=config.StepConfig(
            precision=values.precision,
            hook=values.hook,
            transport=values.transport,
            accumulate_steps=values.accumulate_steps,
            clip_global_norm=values.clip_global_norm,
            jit_compile=values.jit_compile,
        ),
        output=config.OutputConfig(
            log_dir=values.log_dir,
            checkpoint_dir=values.checkpoint_dir,
            checkpoint_every=values.checkpoint_every,
            keep_checkpoints=values.keep_checkpoints,
            resume=values.resume,
            on_save_error=values.on_save_error,
            async_save=values.async_save,
            summary_json=values.summary_json,
            trace_steps=values.trace_steps,
            profile=values.profile,
        ),
        seed=values.seed,
    )
    if found.step.hook is not None:
        from tfdist import hooks  # brings TensorFlow: only where a hook was asked for

        try:
            hooks.parse(found.step.hook)
        except UsageError as error:  # it begins with hook=
            raise UsageError(f"--{error}") from None
    return found


def run_main(main: Callable[[], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Parses the flags, runs `main`, and exits: 0 done, 1 failed, 2 wrong use.

    A UsageError and a wrong flag are told in one line, without a traceback, and so are a PeerError and a SaveError.
    SIGTERM ends the process with `EXIT_REQUEUE`; a training that saves checkpoints stops at a step and saves first.

    Args:
        main: Does the work; what it returns is the exit code, None stands for 0.
        argv: Program name and arguments; None for those of this process.
    """
    # TensorFlow tells of every collective it makes; tfdist's own lines are few.
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    for number in stop_signals():
        signal.signal(number, exit_for_requeue)
    app.run(lambda _: _guarded(main), argv=None if argv is None else list(argv), flags_parser=_parse_argv)
    raise AssertionError("app.run came back")


def _guarded(main: Callable[[], int | None]) -> int:
    try:
        return main() or EXIT_DONE
    except UsageError as error:
        return _say(error, EXIT_WRONG_USE)
    except (PeerError, SaveError) as error:
        return _say(error, EXIT_FAILED)
    except Exception as error:
        kind = type(error)
        if kind.__name__ != "UnavailableError" or not kind.__module__.startswith("tensorflow"):
            raise
        return _say(f"{kind.__name__}: another worker has gone, and a collective with it", EXIT_FAILED)


def _parse_argv(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_say(f"{error} (--help lists the flags)", EXIT_WRONG_USE))
    except SystemExit:  # help was printed; absl would exit with 1
        sys.exit(EXIT_DONE)
    if len(rest) > 1:
        sys.exit(_say(f"argument {rest[1]!r}: only flags are taken, written --name=value", EXIT_WRONG_USE))
    return rest


def _say(error: object, code: int) -> int:
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def _choices(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
