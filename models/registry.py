"""Names -> models: the built-in ones, and any function of the user's."""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import keras

from models import digits_cnn, mlp, recommender, resnet, transformer_lm, vit
from tfdist.config import did_you_mean
from tfdist.errors import UsageError

Task = Literal["image_classification", "language_model", "recommendation", "other"]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A kind of model, and how it is trained where nobody says otherwise.

    Attributes:
        name: What `--model` calls it.
        build: Returns an uncompiled model that puts out logits; its keyword arguments are the sizes.
        loss: Returns a new loss.
        metrics: Returns new metrics.
        task: What kind of data it is for; "other" fits its sizes to no data.
    """

    name: str
    build: Callable[..., keras.Model]
    loss: Callable[[], Any]
    metrics: Callable[[], list[Any]]
    task: Task = "other"


def classification_loss() -> keras.losses.Loss:
    """Returns the cross-entropy of integer labels, from logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classification_metrics() -> list[keras.metrics.Metric]:
    """Returns the accuracy of integer labels."""
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def binary_loss() -> keras.losses.Loss:
    """Returns the cross-entropy of labels 0 and 1, from logits."""
    return keras.losses.BinaryCrossentropy(from_logits=True)


def binary_metrics() -> list[keras.metrics.Metric]:
    """Returns accuracy and the area under the ROC curve of labels 0 and 1, from logits."""
    return [
        keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0),
        keras.metrics.AUC(name="auc", from_logits=True),
    ]


def _classifier(name: str, build: Callable[..., keras.Model], task: Task) -> ModelSpec:
    return ModelSpec(name, build, classification_loss, classification_metrics, task)


_SPECS = (
    _classifier("mlp", mlp.build, "image_classification"),
    _classifier("digits_cnn", digits_cnn.build, "image_classification"),
    _classifier("resnet18", resnet.build_18, "image_classification"),
    _classifier("resnet50", resnet.build_50, "image_classification"),
    _classifier("transformer_lm", transformer_lm.build, "language_model"),
    _classifier("vit", vit.build, "image_classification"),
    ModelSpec("recommender", recommender.build, binary_loss, binary_metrics, "recommendation"),
)

BUILTIN: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def find(name_or_path: str) -> ModelSpec:
    """Returns the model that `--model` asks for.

    Args:
        name_or_path: A built-in name, or `package.module:name` with the working directory importable: a ModelSpec,
            or a function that returns a model, which is then taken as a classifier of integer labels.

    Raises:
        UsageError: If there is no such model.
    """
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path]
    path, colon, name = name_or_path.partition(":")
    if not colon or not name or not path:
        raise UsageError(
            f"--model={name_or_path!r}: choose one of {', '.join(BUILTIN)}, or give "
            f"package.module:function{did_you_mean(name_or_path, list(BUILTIN))}"
        )
    module = _import(path, name_or_path)
    if not hasattr(module, name):
        raise UsageError(
            f"--model={name_or_path!r}: {module.__file__} has no {name!r}{did_you_mean(name, dir(module))}"
        )
    found = getattr(module, name)
    if isinstance(found, ModelSpec):
        return found
    if not callable(found):
        raise UsageError(
            f"--model={name_or_path!r}: {name} is {type(found).__name__}; a function that returns a keras.Model, "
            "or a models.ModelSpec, is needed"
        )
    return ModelSpec(name_or_path, found, classification_loss, classification_metrics)


def build(spec: ModelSpec, **sizes: Any) -> keras.Model:
    """Builds a model; call it under the strategy's scope.

    Args:
        spec: Which one.
        **sizes: Arguments of its function.

    Raises:
        UsageError: If the function has no such argument, or a value cannot be right.
    """
    parameters = inspect.signature(spec.build).parameters.values()
    allowed = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in sizes:
        if name not in allowed and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise UsageError(
                f"--model_config: {spec.name} has no {name!r}; it takes {', '.join(allowed) or 'nothing'}"
                f"{did_you_mean(name, allowed)}"
            )
    missing = [p.name for p in parameters if p.name in allowed and p.default is p.empty and p.name not in sizes]
    if missing:
        raise UsageError(f"--model_config: {spec.name} needs {', '.join(missing)}; add {missing[0]}=...")
    try:
        model = spec.build(**sizes)
    except UsageError as error:
        raise UsageError(f"--model_config, {spec.name}: {error}") from None
    if not isinstance(model, keras.Model):
        raise UsageError(f"--model={spec.name!r} returned {type(model).__name__}; a keras.Model is needed")
    return model


def load(name_or_path: str, **sizes: Any) -> keras.Model:
    """Finds and builds a model; see `find` and `build`.

    Args:
        name_or_path: A built-in name or `package.module:name`.
        **sizes: Arguments of its function.

    Raises:
        UsageError: If there is no such model or a size cannot be right.
    """
    return build(find(name_or_path), **sizes)


def _import(path: str, value: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(path)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else path
        if missing is None or not (path == missing or path.startswith(f"{missing}.")):
            raise  # the module is there and fails by itself: its traceback says where
    package = sys.modules.get(path.partition(".")[0])
    where = f" in the package at {package.__file__}" if package is not None and "." in path else ""
    raise UsageError(
        f"--model={value!r}: there is no module {path!r}{where}; it has to be installed or in the working directory "
        f"{os.getcwd()}"
    )
