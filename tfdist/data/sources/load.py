"""Data by name: `digits`, `bytes:PATH`, `tfrecord:GLOB`, `synthetic:...`, or a function of the user's."""

import dataclasses
import importlib
import inspect
import os
import sys
from typing import Any

import keras
import tensorflow as tf

from tfdist.config import did_you_mean
from tfdist.data.adapt import as_source
from tfdist.data.source import ArraySource, BatchSource, ExampleSource
from tfdist.data.sources.digits import load_digits
from tfdist.data.sources.parameters import parse_parameters, require_at_least
from tfdist.data.sources.synthetic import load_synthetic
from tfdist.data.sources.text import load_text
from tfdist.data.sources.tfrecord import load_tfrecord
from tfdist.errors import UsageError

BUILTIN = ("digits", "bytes", "tfrecord", "synthetic")
Source = ExampleSource | BatchSource


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The parts of a data set.

    Attributes:
        train: what to train on.
        validation: what to look at during training, or None.
        test: what to look at in the end, or None.
        name: what it was loaded as.
    """

    train: Source
    validation: "Source | None" = None
    test: "Source | None" = None
    name: str = ""

    @property
    def num_classes(self) -> "int | None":
        """Number of classes of integer labels, where known."""
        return self.train.num_classes

    @property
    def element_spec(self) -> Any:
        """Specs of one example, where the examples can be picked by index; else None."""
        return self.train.element_spec if isinstance(self.train, ExampleSource) else None


def load(spec: str, *, batch_size: int, seed: "int | None" = None) -> Datasets:
    """Returns the data that `spec` names.

    Args:
        spec: `digits`; `bytes:PATH[,seq_len=128]`; `tfrecord:GLOB`; `synthetic:name=value,...`; or
            `package.module:function`, with the working directory importable. The function is called with batch_size
            and seed where it takes them, and returns a Datasets, a pair (train, test) of sources or datasets, a source,
            a `tf.data.Dataset` of global batches, or arrays (x, y).
        batch_size: global batch size.
        seed: seed of the order of the training examples.

    Raises:
        UsageError: unknown name or parameter, missing, empty or damaged files.
    """
    name, colon, rest = spec.partition(":")
    if name == "digits":
        if colon:
            raise UsageError(f"--data={spec!r}: digits takes no parameters; write --data=digits")
        train, test = load_digits(batch_size=batch_size, seed=seed)
        return Datasets(train, test=test, name=spec)
    if name == "bytes":
        path, comma, tail = rest.rpartition(",") if ",seq_len=" in rest else (rest, "", "")
        seq_len = parse_parameters(spec, tail, {"seq_len": 128})["seq_len"]
        require_at_least(spec, "seq_len", seq_len, 1)
        if not path:
            raise UsageError(f"--data={spec!r}: the path is missing; write --data=bytes:FILE_OR_FOLDER")
        train, validation = load_text(spec, path, seq_len, batch_size=batch_size, seed=seed)
        return Datasets(train, validation=validation, name=spec)
    if name == "tfrecord":
        return Datasets(load_tfrecord(spec, rest, batch_size=batch_size, seed=seed), name=spec)
    if name == "synthetic":
        train, test = load_synthetic(spec, rest, batch_size=batch_size, seed=seed)
        return Datasets(train, test=test, name=spec)
    if not colon or not name or not rest:
        raise UsageError(
            f"--data={spec!r}: choose digits, bytes:PATH, tfrecord:GLOB or synthetic:name=value,..., or give "
            f"package.module:function{did_you_mean(name, BUILTIN)}"
        )
    return _of_function(spec, name, rest, batch_size, seed)


def is_function(spec: str) -> bool:
    """Whether `spec` names a function of the user's. Everything else is read without touching a device."""
    name, colon, _ = spec.partition(":")
    return bool(colon) and name not in BUILTIN


def _of_function(spec: str, module_name: str, name: str, batch_size: int, seed: "int | None") -> Datasets:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise UsageError(
            f"--data={spec!r}: there is no module {module_name!r}; it has to be installed or in the working directory "
            f"{os.getcwd()}{did_you_mean(module_name, BUILTIN)}"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--data={spec!r}: {module_name} has no function {name!r}{did_you_mean(name, dir(module))}")
    takes = inspect.signature(function).parameters
    arguments = {k: v for k, v in {"batch_size": batch_size, "seed": seed}.items() if k in takes}
    found = function(**arguments)
    if isinstance(found, Datasets):
        return found
    if isinstance(found, tuple) and len(found) == 2 and all(_is_dataset(part) for part in found):
        return Datasets(as_source(found[0]), test=as_source(found[1]), name=spec)
    if _is_dataset(found):
        return Datasets(as_source(found), name=spec)
    if isinstance(found, tuple) and len(found) in (2, 3):
        return Datasets(ArraySource(found, batch_size=batch_size, seed=seed), name=spec)
    raise UsageError(
        f"--data={spec!r} returned {type(found).__name__}; it has to return tfdist.data.Datasets, a pair (train, "
        "test), a tf.data.Dataset of global batches, or arrays (x, y)"
    )


def _is_dataset(value: Any) -> bool:
    return isinstance(value, ExampleSource | BatchSource | tf.data.Dataset | keras.utils.PyDataset)
