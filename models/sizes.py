"""Fits the sizes of a model to data."""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from models.registry import ModelSpec
from tfdist.errors import UsageError


class DataInfo(Protocol):
    """What is known about data; `tfdist.data.ExampleSource` is one.

    Attributes:
        element_spec: Specs of one example (x,), (x, y) or (x, y, weight), without batch dimension.
        num_classes: How many classes or tokens the labels have, or None.
    """

    element_spec: Any
    num_classes: int | None


def config_for(spec: ModelSpec, data: "DataInfo | Any", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns `given` and, of what is not given, the sizes that the data has.

    Images give image_shape and classes, text gives seq_len and vocab, features for a recommender give categories
    and dense. A model of the user's gets what its function has arguments for by these names.

    Args:
        spec: The model.
        data: Describes the data; without element_spec or num_classes these sizes stay as they are.
        given: Sizes that the user chose.

    Raises:
        UsageError: If the data is of another kind than the model is for, or has more classes than were given.
    """
    given = dict(given or {})
    element = getattr(data, "element_spec", None)
    x = element[0] if isinstance(element, tuple) and element else element
    found = {} if x is None else _sizes_of(spec, x)
    classes = getattr(data, "num_classes", None)
    outputs = "vocab" if spec.task == "language_model" else "classes"
    if classes is not None and spec.task != "recommendation":
        found[outputs] = int(classes)
        chosen = given.get(outputs)
        if isinstance(chosen, int) and chosen < classes:
            raise UsageError(
                f"--model_config: {outputs}={chosen}, but the labels go from 0 to {classes - 1}; "
                f"at least {outputs}={classes} is needed (or leave it out)"
            )
    takes = inspect.signature(spec.build).parameters
    return {**{name: value for name, value in found.items() if name in takes}, **given}


def _sizes_of(spec: ModelSpec, x: Any) -> dict[str, Any]:
    if spec.task == "image_classification":
        if not _is_tensor(x) or not _known(x) or not x.dtype.is_floating or len(x.shape) < 1:
            raise _misfit(spec, "images (float, of known shape)", x)
        if spec.name != "mlp" and len(x.shape) != 3:
            raise _misfit(spec, "images of shape (height, width, channels)", x)
        return {"image_shape": tuple(x.shape)}
    if spec.task == "language_model":
        if not _is_tensor(x) or not _known(x) or not x.dtype.is_integer or len(x.shape) != 1:
            raise _misfit(spec, "integer tokens of shape (seq_len,)", x)
        return {"seq_len": int(x.shape[0])}
    if spec.task == "recommendation":
        wanted = {"categories", "dense"}
        if (
            not isinstance(x, Mapping)
            or set(x) != wanted
            or not all(_is_tensor(leaf) and _known(leaf) and len(leaf.shape) == 1 for leaf in x.values())
        ):
            raise _misfit(spec, '{"categories": integers of shape (n,), "dense": floats of shape (m,)}', x)
        return {name: int(x[name].shape[0]) for name in sorted(wanted)}
    if _is_tensor(x) and _known(x):
        sizes: dict[str, Any] = {"image_shape": tuple(x.shape)}
        if len(x.shape) == 1:
            sizes["seq_len"] = int(x.shape[0])
        return sizes
    return {}


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _known(x: Any) -> bool:
    return x.shape.rank is not None and None not in tuple(x.shape)


def _misfit(spec: ModelSpec, wanted: str, x: Any) -> UsageError:
    return UsageError(
        f"--model={spec.name!r} does not fit --data: it takes {wanted}, and an example is {x}; "
        "choose another model or other data"
    )
