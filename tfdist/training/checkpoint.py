"""Checkpoints: everything that training needs to go on bit for bit, written whole or not at all.

A checkpoint is a folder `step-00000120` that holds TensorFlow's own `tf.train.Checkpoint` files and
`checkpoint.json` (position, seed, and a SHA-256 of every other file). The folder is written under a temporary
name and renamed when it is complete.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.data import Position
from tfdist.errors import UsageError
from tfdist.hooks import Hook, ReplicaState
from tfdist.strategy import is_chief
from tfdist.training import seams
from tfdist.training.hook_state import StateGatherer, restore_state, saved_shape
from tfdist.training.workers import broadcast_int, gathered

RESUME = ("auto", "never", "must")
_FOLDER = re.compile(r"step-(\d{8,})$")
_META = "checkpoint.json"
_STATE = "state"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"  # how tf.train.Checkpoint ends the key of a variable
_log = logging.getLogger("tfdist")


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is incomplete or its files are not those that were written."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint says besides the values of variables.

    Attributes:
        step: training steps done.
        position: where in the data to go on.
        path: the checkpoint's folder.
    """

    step: int
    position: Position
    path: Path


class Checkpoints:
    """The checkpoints of one training in one folder.

    Args:
        directory: created when the first checkpoint is written. Shared by all workers.
        model: the model; built, with a built optimizer, before `save` and `restore`.
        strategy: the strategy. Every worker calls `save` and `restore`; the chief writes.
        hook: its state is saved too.
        keep: how many checkpoints stay.
    """

    def __init__(
        self,
        directory: "str | os.PathLike",
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        hook: "Hook | None" = None,
        keep: int = 3,
    ):
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep={keep!r}: at least 1 checkpoint must be kept")
        self.directory = Path(directory)
        self.keep = keep
        self._model = model
        self._strategy = strategy
        self._hook = hook
        self._gatherer: StateGatherer | None = None

    def save(self, step: int, position: Position) -> "Path | None":
        """Writes a checkpoint, then removes the oldest beyond `keep`.

        Every worker calls it: the chief writes, the others go on at once.

        Args:
            step: training steps done.
            position: where in the data to go on.

        Returns:
            The checkpoint's folder, on the chief; None on the others.
        """
        if self._gatherer is None:
            self._gatherer = StateGatherer(self._strategy, [] if self._hook is None else self._hook.state)
        hook_values = self._gatherer.values()
        if not is_chief(self._strategy):
            return None
        final = self.directory / f"step-{step:08d}"
        if final.exists() and _damage(final) is None:
            return final
        self.directory.mkdir(parents=True, exist_ok=True)
        for left_over in self.directory.glob(".step-*"):
            # Only the chief writes here: this is what a killed one left.
            shutil.rmtree(left_over, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".step-{step:08d}-", dir=self.directory))
        try:
            objects = self._objects()
            with tf.device("CPU:0"):
                objects |= {_hook_key(i): tf.Variable(value) for i, value in enumerate(hook_values)}
            tf.train.Checkpoint(**objects).write(str(temporary / _STATE))
            meta = {"step": step, "position": position.to_json(), "files": _digests(temporary)}
            (temporary / _META).write_text(json.dumps(meta, indent=1), encoding="utf8")
            for file in temporary.iterdir():
                _sync(file)
            os.chmod(temporary, 0o755)
            if final.exists():
                # A damaged checkpoint of the same step gives way.
                shutil.rmtree(final)
            os.rename(temporary, final)
            _sync(self.directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in _folders(self.directory)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def restore(self, resume: str = "auto") -> "Saved | None":
        """Restores the newest whole checkpoint into model, optimizer and hook.

        The number of replicas and workers may differ from when it was written. A damaged checkpoint is named in
        the log and the one before it is used. Every worker restores the checkpoint that the chief chose.

        Args:
            resume: "auto" (where there is one), "must" (or fail), "never".

        Returns:
            What was restored, or None where nothing was.

        Raises:
            UsageError: unknown `resume`, or "must" without a whole checkpoint.
        """
        if resume not in RESUME:
            raise UsageError(f"resume={resume!r}: choose one of {', '.join(RESUME)}")
        if resume == "never":
            return None
        found = self.newest()
        step = broadcast_int(self._strategy, -1 if found is None else found.step)
        if step < 0:
            if resume == "must":
                require_checkpoint(self.directory)
            return None
        saved = _read(self.directory / f"step-{step:08d}") if found is None or found.step != step else found
        if min(gathered(self._strategy, int(saved is not None))) == 0:
            raise UsageError(
                f"checkpoint_dir={str(self.directory)!r}: not every worker can read the checkpoint of step {step} "
                "that the chief found; all workers must see the same folder"
            )
        objects = self._objects()
        states = [] if self._hook is None else self._hook.state
        misfit = _misfit(objects, states, saved.path / _STATE)
        if misfit:
            raise UsageError(
                f"checkpoint {saved.path} does not fit the model, its optimizer or the hook: {misfit}; resume with the "
                "configuration that wrote it, or use another checkpoint_dir"
            )
        status = tf.train.Checkpoint(**objects).read(str(saved.path / _STATE))
        status.assert_existing_objects_matched().expect_partial()  # the hook's state is read below
        reader = tf.train.load_checkpoint(str(saved.path / _STATE))
        for i, state in enumerate(states):
            restore_state(self._strategy, state, reader.get_tensor(_hook_key(i) + _VALUE))
        _log.info("resumed from %s at step %d", saved.path, saved.step)
        return saved

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


def newest_checkpoint(directory: "str | os.PathLike") -> "Saved | None":
    """Returns the newest whole checkpoint in `directory`; names damaged ones in the log. Touches no device."""
    for folder in reversed(_folders(Path(directory))):
        damage = _damage(folder)
        if damage is None:
            return _read(folder)
        _log.warning("checkpoint %s is damaged (%s); the one before it is used", folder, damage)
    return None


def require_checkpoint(directory: "str | os.PathLike") -> Saved:
    """Returns the newest whole checkpoint in `directory`.

    Raises:
        UsageError: where there is none.
    """
    found = newest_checkpoint(directory)
    if found is None:
        raise UsageError(
            f"resume='must': there is no whole checkpoint in {str(directory)!r}; give the folder that has one "
            "(checkpoint_dir), or resume='auto' to start anew"
        )
    return found


def _folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in directory.iterdir() if (m := _FOLDER.match(p.name))]
    return [path for _, path in sorted(found)]


def _damage(folder: Path) -> "str | None":
    """Says what is wrong with a checkpoint, or None."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf8"))
        expected = meta["files"]
        Position.from_json(meta["position"])
        int(meta["step"])
    except FileNotFoundError:
        return f"{_META} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_META} cannot be read: {error}"
    for name, digest in expected.items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != digest:
            return f"{name} is not what was written"
    return None


def _misfit(objects: dict[str, Any], states: Sequence[ReplicaState], state: Path) -> "str | None":
    """Says how a checkpoint's values do not fit the variables, or None; restoring would change some before it fails."""
    reader = tf.train.load_checkpoint(str(state))
    shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    wanted = {name: (variable, variable.shape) for name, variable in objects.items()}
    wanted |= {_hook_key(i): (held.variable, saved_shape(held)) for i, held in enumerate(states)}
    for name, (variable, shape) in wanted.items():
        key, shown = name + _VALUE, variable.name.removesuffix(":0")
        if key not in shapes:
            return f"it has no value for {shown} ({_place(name)})"
        if not tf.TensorShape(shape).is_compatible_with(shapes[key]):
            return f"{shown} has shape {tuple(shape)}, and {tuple(shapes[key])} was saved"
        if variable.dtype != types[key]:
            return f"{shown} has type {variable.dtype.name}, and {types[key].name} was saved"
    for key in sorted(shapes):
        if key.endswith(_VALUE) and key.removesuffix(_VALUE) not in wanted:
            return f"{_place(key.removesuffix(_VALUE))} was saved, and there is no such variable"
    return None


def _hook_key(number: int) -> str:
    return f"hook_{number:05d}"


def _place(name: str) -> str:
    group, _, number = name.partition("_")
    return f"{group} {int(number)}"


def _read(folder: Path) -> "Saved | None":
    if _damage(folder) is not None:
        return None
    meta = json.loads((folder / _META).read_text(encoding="utf8"))
    return Saved(int(meta["step"]), Position.from_json(meta["position"]), folder)


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: _digest(file) for file in sorted(folder.iterdir())}


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return (
            hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _chunked(stream)
        )


def _chunked(stream: Any) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
