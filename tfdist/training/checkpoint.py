"""Checkpoints: everything that training needs to go on bit for bit, written while it goes on."""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.base import is_started_again, job_name
from tfdist.data import Position
from tfdist.errors import SaveError, UsageError
from tfdist.hooks import Hook, ReplicaState
from tfdist.liveness.pulse import say
from tfdist.strategy import is_chief, pulse_of
from tfdist.training import seams
from tfdist.training.checkpoint_files import (
    STATE,
    VALUE,
    Saved,
    identity_of,
    newest_checkpoint,
    note_evaluation_due,
    object_graph,
    read_saved,
    remove_left_overs,
    require_checkpoint,
    set_aside,
    write_checkpoint,
)
from tfdist.training.hook_state import StateGatherer, restore_state, saved_shape
from tfdist.training.workers import broadcast_int, gathered
from tfdist.training.writer import Writer

RESUME = ("auto", "never", "must")
ON_ERROR = ("stop", "continue")
_log = logging.getLogger("tfdist")


class Checkpoints:
    """The checkpoints of one training in one folder.

    Args:
        directory: created when the first checkpoint is written. Shared by all workers. Checkpoints of an earlier
            training that this one does not go on from are moved into a folder of their own in it.
        model: the model; built, with a built optimizer, before `save` and `restore`.
        strategy: the strategy. Every worker calls `save` and `restore`; the chief writes.
        hook: its state is saved too.
        keep: how many checkpoints stay.
        on_error: what to do where a checkpoint cannot be written: "stop" the training, or "continue" it.
        asynchronous: training goes on while a checkpoint is written. A worker that is lost meanwhile takes it along, so
            that up to twice as many steps are repeated.
    """

    def __init__(
        self,
        directory: "str | os.PathLike",
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        hook: "Hook | None" = None,
        keep: int = 3,
        on_error: str = "stop",
        asynchronous: bool = True,
    ):
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep={keep!r}: at least 1 checkpoint must be kept")
        if on_error not in ON_ERROR:
            raise UsageError(f"on_save_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")
        self.directory = Path(directory)
        self.keep = keep
        self.on_error = on_error
        self.asynchronous = asynchronous
        self._writer = Writer()
        self._identity: tuple[int, int] | None = None
        self._last: Path | None = None
        self._goes_on = False
        pulse_of(strategy).finish_before_exit(self._writer)
        self._model = model
        self._strategy = strategy
        self._hook = hook
        self._gatherer: StateGatherer | None = None
        self._reads: tuple[tuple[int, ...], Any] | None = None

    def prepare(self) -> None:
        """Prepares the first save, which would take longer than a step otherwise; the hook is built, too."""
        if is_chief(self._strategy):
            objects = self._objects()
            self._prepare_snapshot(objects)
            object_graph((*objects, *map(_hook_key, range(0 if self._hook is None else len(self._hook.state)))))

    def save(self, step: int, position: Position, *, wait: bool = False, evaluation_due: bool = False) -> None:
        """Takes what there is now, and writes it, while training goes on.

        Every worker calls it: the chief takes a copy and writes it in a thread, one checkpoint after the other; the
        others go on at once. Oldest checkpoints beyond `keep` are removed.

        Args:
            step: training steps done.
            position: where in the data to go on.
            wait: return when the checkpoint is on the disk.
            evaluation_due: whether an evaluation was broken off, and is to be done first when training goes on.

        Raises:
            SaveError: on the chief, where this checkpoint or one before it could not be written, and `on_error` is
                "stop".
        """
        if self._gatherer is None:
            self._gatherer = StateGatherer(self._strategy, [] if self._hook is None else self._hook.state)
        hook_values = self._gatherer.values()
        if not is_chief(self._strategy):
            return
        values = self._snapshot(self._objects())
        with tf.device("CPU:0"):
            values |= {_hook_key(i): tf.constant(value) for i, value in enumerate(hook_values)}
        object_graph(tuple(values))  # known where `prepare` was called; a thread cannot make it when Python is ending
        self._writer.write(lambda rest: self._write(step, position, values, evaluation_due, rest), f"step {step}")
        if wait or not self.asynchronous:
            self.wait()
        self.check()

    def wait(self) -> None:
        """Returns when nothing is left to write."""
        self._writer.wait()

    def check(self) -> None:
        """Looks whether all checkpoints so far could be written; costs nothing.

        Raises:
            SaveError: where one could not, and `on_error` is "stop".
        """
        if self._writer.error is None:
            return
        error, self._writer.error = self._writer.error, None
        what = f"the checkpoint of {error.what} could not be written into {self.directory}: {error.why}"
        if self.on_error == "stop":
            raise SaveError(
                f"{what}. Earlier checkpoints are untouched. Make room, or repair the folder, and start again; "
                "on_save_error='continue' trains on without it"
            )
        _log.warning("%s; training goes on, and would be resumed from an earlier checkpoint", what)

    def _write(
        self,
        step: int,
        position: Position,
        values: dict[str, tf.Tensor],
        evaluation_due: bool,
        rest: Callable[[], None],
    ) -> None:
        if self._identity is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._goes_on and (aside := set_aside(self.directory)) is not None:
                _log.warning("the checkpoints of an earlier training in %s are now in %s", self.directory, aside)
            self._identity = identity_of(self.directory)
        elif self._last is not None and self._last.is_dir():
            self._identity = identity_of(self.directory)  # a disk that was mounted anew has another one
        folder = write_checkpoint(
            self.directory, step, position, values, keep=self.keep, identity=self._identity, rest=rest
        )
        self._last = folder
        if evaluation_due:
            note_evaluation_due(folder)

    def _snapshot(self, objects: dict[str, Any]) -> dict[str, tf.Tensor]:
        """Returns the values of now on this process's first replica, on the host; between steps all have the same.

        One compiled function reads them all: to read one after the other takes a tenth of a step of a transformer.
        What is on the host already is not copied here. The value then shares its memory with the variable, and
        TensorFlow copies it in the step that next writes to it (`tests/training/test_checkpoint.py`).
        """
        self._prepare_snapshot(objects)
        return dict(zip(objects, self._reads[1](), strict=True))

    def _prepare_snapshot(self, objects: dict[str, Any]) -> None:
        key = tuple(map(id, objects.values()))
        if self._reads is None or self._reads[0] != key:
            held = [self._strategy.experimental_local_results(variable)[0] for variable in objects.values()]

            def read() -> list[tf.Tensor]:
                with tf.device("CPU:0"):
                    return [tf.identity(tf.convert_to_tensor(variable)) for variable in held]

            self._reads = key, tf.function(read, autograph=False).get_concrete_function()

    def restore(self, resume: str = "auto") -> "Saved | None":
        """Restores the newest whole checkpoint into model, optimizer and hook.

        The number of replicas and workers may differ from when it was written. A damaged checkpoint is named in
        the log and the one before it is used. Every worker restores the checkpoint that the chief chose.

        Args:
            resume: "auto" (where there is one), "must" (or fail), "never" (but a job that was started again goes on
                from what it has saved itself).

        Returns:
            What was restored, or None where nothing was.

        Raises:
            UsageError: unknown `resume`, or "must" without a whole checkpoint.
        """
        if resume not in RESUME:
            raise UsageError(f"resume={resume!r}: choose one of {', '.join(RESUME)}")
        pulse_of(self._strategy).finish_work()  # a training before this one in the same process may still be saving
        if resume == "never" and not is_started_again():
            return None
        found = self.newest()
        if resume == "never" and found is not None and (found.job is None or found.job != job_name()):
            found = None  # an earlier job's: this one has saved nothing yet
        if is_chief(self._strategy):
            remove_left_overs(self.directory)
        step = broadcast_int(self._strategy, -1 if found is None else found.step)
        # Another worker's view of a shared folder may be older, and all have to do the same.
        evaluation_due = broadcast_int(self._strategy, int(found is not None and found.evaluation_due))
        if step < 0:
            if resume == "must":
                require_checkpoint(self.directory)
            return None
        saved = read_saved(self.directory / f"step-{step:08d}") if found is None or found.step != step else found
        if min(gathered(self._strategy, int(saved is not None))) == 0:
            raise UsageError(
                f"checkpoint_dir={str(self.directory)!r}: not every worker can read the checkpoint of step {step} "
                "that the chief found; all workers must see the same folder"
            )
        objects = self._objects()
        states = [] if self._hook is None else self._hook.state
        misfit = _misfit(objects, states, saved.path / STATE)
        if misfit:
            raise UsageError(
                f"checkpoint {saved.path} does not fit the model, its optimizer or the hook: {misfit}; resume with the "
                "configuration that wrote it, or use another checkpoint_dir"
            )
        status = tf.train.Checkpoint(**objects).read(str(saved.path / STATE))
        status.assert_existing_objects_matched().expect_partial()  # the hook's state is read below
        reader = tf.train.load_checkpoint(str(saved.path / STATE))
        for i, state in enumerate(states):
            restore_state(self._strategy, state, reader.get_tensor(_hook_key(i) + VALUE))
        self._goes_on = True
        if is_chief(self._strategy):
            say(f"resumed from {saved.path} at step {saved.step}")
        return dataclasses.replace(saved, evaluation_due=bool(evaluation_due))

    def newest(self) -> "Saved | None":
        """Returns the newest whole checkpoint; names damaged ones in the log."""
        return newest_checkpoint(self.directory)

    def _objects(self) -> dict[str, Any]:
        """Names every variable by its place, so that a checkpoint does not depend on automatic layer names."""
        metrics = {id(v) for metric in self._model.metrics for v in metric.variables}
        variables = [v for v in self._model.variables if id(v) not in metrics]
        groups = {"model": variables}
        for i, optimizer in enumerate(seams.optimizers_of(self._model)):
            groups[f"optimizer{i}"] = list(optimizer.variables)
        known = {id(v) for v in variables}
        groups["seed"] = [g.state for g in seams.seed_generators(self._model) if id(g.state) not in known]
        return {
            f"{group}_{i:05d}": variable.value if isinstance(variable, keras.Variable) else variable
            for group, members in groups.items()
            for i, variable in enumerate(members)
        }


def _misfit(objects: dict[str, Any], states: Sequence[ReplicaState], state: Path) -> "str | None":
    """Says how a checkpoint's values do not fit the variables, or None; restoring would change some before it fails."""
    reader = tf.train.load_checkpoint(str(state))
    shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    wanted = {name: (variable, variable.shape) for name, variable in objects.items()}
    wanted |= {_hook_key(i): (held.variable, saved_shape(held)) for i, held in enumerate(states)}
    for name, (variable, shape) in wanted.items():
        key, shown = name + VALUE, variable.name.removesuffix(":0")
        if key not in shapes:
            return f"it has no value for {shown} ({_place(name)})"
        if not tf.TensorShape(shape).is_compatible_with(shapes[key]):
            return f"{shown} has shape {tuple(shape)}, and {tuple(shapes[key])} was saved"
        if variable.dtype != types[key]:
            return f"{shown} has type {variable.dtype.name}, and {types[key].name} was saved"
    for key in sorted(shapes):
        if key.endswith(VALUE) and key.removesuffix(VALUE) not in wanted:
            return f"{_place(key.removesuffix(VALUE))} was saved, and there is no such variable"
    return None


def _hook_key(number: int) -> str:
    return f"hook_{number:05d}"


def _place(name: str) -> str:
    group, _, number = name.partition("_")
    return f"{group} {int(number)}"
