"""The files of checkpoints: written whole or not at all, and checked before they are read.

A checkpoint is a folder `step-00000120` that holds TensorFlow's own `tf.train.Checkpoint` files and
`checkpoint.json` (position, seed, and a SHA-256 of every other file). The folder is written under a temporary
name and renamed when it is complete.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import heapq
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.cluster.base import job_name
from tfdist.data import Position
from tfdist.errors import UsageError
from tfdist.files import write_whole

STATE = "state"
"""How the names of TensorFlow's files begin."""
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""How tf.train.Checkpoint ends the key of a variable."""
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_PART_BYTES, _MOST_PARTS = 4 << 20, 8
_FOLDER = re.compile(r"step-(\d{8,})$")
_META = "checkpoint.json"
_EVALUATION_DUE = "evaluation_due"
_log = logging.getLogger("tfdist")


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint says besides the values of variables.

    Attributes:
        step: training steps done.
        position: where in the data to go on.
        path: the checkpoint's folder.
        evaluation_due: whether an evaluation after that step was broken off.
        job: which job wrote it, as `job_name` says.
    """

    step: int
    position: Position
    path: Path
    evaluation_due: bool = False
    job: str | None = None


def write_checkpoint(
    directory: Path,
    step: int,
    position: Position,
    values: Mapping[str, tf.Tensor],
    *,
    keep: int,
    identity: tuple[int, int],
    rest: Callable[[], None],
) -> Path:
    """Writes a checkpoint, then removes the oldest beyond `keep`.

    Args:
        directory: exists.
        step: training steps done.
        position: where in the data to go on.
        values: the values of all variables, by name, on the host.
        keep: how many checkpoints stay.
        identity: of the directory. To make another one in its place would hide that a disk has gone.
        rest: is called between pieces of work.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the checkpoint could not be written; those that were there still are.
    """
    _require_identity(directory, identity)
    final = directory / f"step-{step:08d}"
    if final.exists() and read_saved(final) is not None:
        return final
    remove_left_overs(directory)
    temporary = Path(tempfile.mkdtemp(prefix=f".step-{step:08d}-", dir=directory))
    try:
        _write_values(temporary / STATE, values, rest)
        meta = {
            "step": step,
            "position": position.to_json(),
            "job": job_name(),
            "files": _digests(temporary, rest),
        }
        (temporary / _META).write_text(json.dumps(meta, indent=1), encoding="utf8")
        for file in (*temporary.iterdir(), temporary):
            rest()
            _sync(file)
        os.chmod(temporary, 0o755)
        _require_identity(directory, identity)
        if final.exists():
            # A damaged checkpoint of the same step gives way.
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if identity_of(directory) not in (None, identity):
            with contextlib.suppress(OSError):
                directory.rmdir()  # TensorFlow makes a folder that is missing
        raise
    # Later ones are damaged, or training would have gone on from there.
    for old in [folder for folder in _folders(directory) if folder.name <= final.name][:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def note_evaluation_due(folder: Path) -> None:
    """Adds to a checkpoint that an evaluation after its step was broken off, and is to be done first."""
    write_whole(folder / _EVALUATION_DUE, "")


def identity_of(directory: Path) -> "tuple[int, int] | None":
    """Returns what tells a folder from another one of the same name; None where there is none."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_identity(directory: Path, identity: tuple[int, int]) -> None:
    if identity_of(directory) != identity:
        raise FileNotFoundError("the folder has vanished")


def remove_left_overs(directory: Path) -> None:
    """Removes what a killed process left; only the chief writes here, so nobody else is at work."""
    for left_over in directory.glob(".step-*"):
        shutil.rmtree(left_over, ignore_errors=True)


def set_aside(directory: Path) -> "Path | None":
    """Moves the checkpoints of an earlier training into a folder of their own; returns it, or None for none."""
    found = _folders(directory)
    if not found:
        return None
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for folder in found:
        folder.rename(aside / folder.name)
    return aside


def _write_values(prefix: Path, values: Mapping[str, tf.Tensor], rest: Callable[[], None]) -> None:
    """Writes what `tf.train.Checkpoint` would write of variables with these names and values, in several files.

    A training that goes on beside needs Python's lock, which `tf.train.Checkpoint` holds for long, and these operations
    do not.
    """
    try:
        with tf.device("CPU:0"):
            named = {name + VALUE: value for name, value in values.items()}
            named[_GRAPH] = tf.constant(object_graph(tuple(values)))
            shared = _equal_parts(named)
            parts = [f"{prefix}-part-{number}" for number in range(len(shared))]
            for part, names in zip(parts, shared, strict=True):
                tensors = [named[name] for name in names]
                tf.raw_ops.SaveV2(prefix=part, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors)
                rest()
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix))
    except tf.errors.OpError as error:
        # TensorFlow tells of a full disk and the like in its own words.
        raise OSError(error.message) from None


def _equal_parts(named: Mapping[str, tf.Tensor]) -> list[list[str]]:
    """Shares names out so that each part has some, and all about the same bytes."""
    sizes = {name: tensor.dtype.size * (tensor.shape.num_elements() or 1) for name, tensor in named.items()}
    parts = max(1, min(_MOST_PARTS, len(named), sum(sizes.values()) // _PART_BYTES))
    shared: list[list[str]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for name in sorted(named, key=lambda name: -sizes[name]):
        held, part = heapq.heappop(heap)
        shared[part].append(name)
        heapq.heappush(heap, (held + max(1, sizes[name]), part))
    return shared


@functools.lru_cache(maxsize=2)
def object_graph(names: tuple[str, ...]) -> bytes:
    """Returns what `tf.train.Checkpoint` writes of variables with these names besides their values."""
    folder = f"ram://tfdist-{uuid.uuid4().hex}"

    def write() -> bytes:
        with tf.device("CPU:0"):
            written = tf.train.Checkpoint(**{name: tf.Variable(0.0) for name in names}).write(f"{folder}/{STATE}")
            graph = tf.raw_ops.RestoreV2(
                prefix=written, tensor_names=[_GRAPH], shape_and_slices=[""], dtypes=[tf.string]
            )
        tf.io.gfile.rmtree(folder)
        return graph[0].numpy()

    # In a thread of its own, which is in no strategy's scope: there variables would be made on all workers.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(write).result()


def newest_checkpoint(directory: "str | os.PathLike") -> "Saved | None":
    """Returns the newest whole checkpoint in `directory`; names damaged ones in the log. Touches no device."""
    for folder in reversed(_folders(Path(directory))):
        found = _inspect(folder)
        if isinstance(found, Saved):
            return found
        _log.warning("checkpoint %s is damaged (%s); the one before it is used", folder, found)
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


def read_saved(folder: Path) -> "Saved | None":
    """Returns what a checkpoint says; None where it is damaged."""
    found = _inspect(folder)
    return found if isinstance(found, Saved) else None


def _inspect(folder: Path) -> "Saved | str":
    """Returns what a checkpoint says, or what is wrong with it."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf8"))
        expected = dict(meta["files"])
        saved = Saved(int(meta["step"]), Position.from_json(meta["position"]), folder, job=meta.get("job"))
    except FileNotFoundError:
        return f"{_META} is missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{_META} cannot be read: {error}"
    if f"{STATE}.index" not in expected:
        return f"{_META} does not name its files"
    for name, digest in expected.items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != digest:
            return f"{name} is not what was written"
    return dataclasses.replace(saved, evaluation_due=(folder / _EVALUATION_DUE).exists())


def _digests(folder: Path, rest: Callable[[], None]) -> dict[str, str]:
    digests = {}
    for file in sorted(folder.iterdir()):
        digests[file.name] = _digest(file)
        rest()
    return digests


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
