"""`ScalingCallback`: telemetry of a training, by `fit` or `TrainLoop`."""

import os
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.telemetry.options import TelemetryOptions
from tfdist.telemetry.watch import Telemetry
from tfdist.training.runner import Runner, runner_of


class ScalingCallback(keras.callbacks.Callback):
    """Measures what each step spends where, and writes it for TensorBoard and `tfdist report`.

    Give it to `fit` of a prepared model, or to `TrainLoop.run(callbacks=[...])`, on every worker. The chief writes.
    Time stamps are taken inside the compiled step. Workers tell each other their figures rarely, about every ten
    seconds, not at each step.

    Args:
        log_dir: folder of the TensorBoard log and of the run's record. The record of an earlier run there is kept.
        every: steps between two points in TensorBoard; None takes what ten seconds hold.
        trace_steps: (first, end): writes a Chrome trace of the steps from `first` to before `end` (counted from 1
            over the whole training) as `trace.json`.
        profile: lets TensorFlow's profiler run over these steps as well.
        hparams: what TensorBoard compares runs by, next to replicas, global batch and hook.
        baseline_examples_per_second: of one replica with the same batch per replica. Efficiency is measured against
            it; without it, it is estimated as the share of a step that is no communication.
        peak_tflops: what one device can do; by default that of known GPUs. Gives the MFU.

    Raises:
        UsageError: an argument is wrong.
    """

    same_on_all = True

    def __init__(
        self,
        log_dir: "str | os.PathLike[str]",
        *,
        every: "int | None" = None,
        trace_steps: "tuple[int, int] | None" = None,
        profile: bool = False,
        hparams: "Mapping[str, Any] | None" = None,
        baseline_examples_per_second: "float | None" = None,
        peak_tflops: "float | None" = None,
    ):
        super().__init__()
        self.options = TelemetryOptions(
            os.fspath(log_dir), every, trace_steps, profile, hparams, baseline_examples_per_second, peak_tflops
        )
        self._telemetry: Telemetry | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to watch `fit`."""
        self.on_loop_begin(runner_of(self.model, "ScalingCallback"))

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the last figures."""
        self.on_loop_end()

    def on_loop_begin(self, runner: Runner) -> None:
        """Begins to watch the steps of `runner`."""
        self._telemetry = Telemetry(self.options, runner)
        runner.watch(self._telemetry, at_stop=self._telemetry.finish)

    def on_loop_end(self) -> None:
        """Writes the last figures."""
        self._telemetry.finish()
