"""Made-up data that can be learnt: for benchmarks, and to try a model before its data is there."""

from typing import Any

import numpy as np

from tfdist.data.source import ArraySource
from tfdist.data.sources.parameters import parse_parameters, require_at_least
from tfdist.errors import UsageError

KINDS: dict[str, dict[str, Any]] = {
    "images": {"examples": 1024, "shape": (28, 28, 1), "classes": 10, "seed": 0},
    "tokens": {"examples": 1024, "seq_len": 128, "vocab": 256, "seed": 0},
    "recommender": {"examples": 4096, "features": 4, "vocab": 1000, "dense": 8, "seed": 0},
}
_TEST_FRACTION = 8


def load_synthetic(
    spec: str, text: str, *, batch_size: int, seed: "int | None" = None
) -> tuple[ArraySource, ArraySource]:
    """Returns (train, test) of `synthetic:[kind=images|tokens|recommender,]name=value,...`.

    - images (default): normal noise of `shape` around a mean of its class; labels int32.
    - tokens: sequences in which each token follows from the one before, but for 10% noise; int32.
    - recommender: {"categories": int32 (features,), "dense": float32 (dense,)} and a label 0 or 1 that depends on both.

    The test part has an eighth as many examples, drawn alike.

    Args:
        spec: the whole spec, for messages.
        text: what follows the colon.
        batch_size: global batch size.
        seed: seed of the order of the examples; the data itself comes from the parameter `seed`.
    """
    pairs = [pair for pair in text.split(",") if pair]
    kinds = [pair.partition("=")[2] for pair in pairs if pair.startswith("kind=")]
    kind = kinds[-1] if kinds else "images"
    if kind not in KINDS:
        raise UsageError(f"--data={spec!r}: kind={kind!r}: choose one of {', '.join(KINDS)}")
    rest = ",".join(pair for pair in pairs if not pair.startswith("kind="))
    values = parse_parameters(spec, rest, KINDS[kind])
    for name, value in values.items():
        if isinstance(value, int) and name != "seed":
            require_at_least(spec, name, value, 2 if name in ("classes", "vocab") else 1)
    draw = {"images": _images, "tokens": _tokens, "recommender": _recommender}[kind]
    count = values["examples"]
    test_count = max(1, count // _TEST_FRACTION)
    arrays = draw(np.random.Generator(np.random.PCG64(values["seed"])), count + test_count, values)
    classes = {"images": values.get("classes"), "tokens": values.get("vocab"), "recommender": 2}[kind]
    train, test = _cut(arrays, slice(0, count)), _cut(arrays, slice(count, None))
    return (
        ArraySource(train, batch_size=batch_size, seed=seed, num_classes=classes),
        ArraySource(test, batch_size=batch_size, shuffle=False, num_classes=classes),
    )


def _images(rng: np.random.Generator, count: int, values: dict[str, Any]) -> tuple:
    means = rng.normal(size=(values["classes"], *values["shape"]))
    labels = rng.integers(values["classes"], size=count)
    return (means[labels] + rng.normal(size=(count, *values["shape"]))).astype(np.float32), labels.astype(np.int32)


def _tokens(rng: np.random.Generator, count: int, values: dict[str, Any]) -> tuple:
    vocab, length = values["vocab"], values["seq_len"]
    follower = rng.permutation(vocab)
    tokens = np.empty((count, length + 1), np.int64)
    tokens[:, 0] = rng.integers(vocab, size=count)
    for i in range(length):
        noise = rng.random(count) < 0.1
        tokens[:, i + 1] = np.where(noise, rng.integers(vocab, size=count), follower[tokens[:, i]])
    tokens = tokens.astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _recommender(rng: np.random.Generator, count: int, values: dict[str, Any]) -> tuple:
    taste = rng.normal(size=(values["features"], values["vocab"]))
    weights = rng.normal(size=values["dense"])
    categories = rng.integers(values["vocab"], size=(count, values["features"]))
    dense = rng.normal(size=(count, values["dense"])).astype(np.float32)
    score = taste[np.arange(values["features"]), categories].sum(axis=1) + dense @ weights
    labels = (score > 0).astype(np.int32)
    return {"categories": categories.astype(np.int32), "dense": dense}, labels


def _cut(arrays: tuple, rows: slice) -> tuple:
    x, y = arrays
    return ({k: v[rows] for k, v in x.items()} if isinstance(x, dict) else x[rows]), y[rows]
