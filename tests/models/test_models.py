"""Each built-in model: what it returns, that it learns, that it can be saved, and what it refuses."""

import pytest

from tfdist.errors import UsageError

IMAGE = {"image_shape": (8, 8, 1), "classes": 5}
TEXT = {"vocab": 11, "seq_len": 6, "width": 8, "depth": 1, "heads": 2}
VIT = {**IMAGE, "patch": 4, "width": 8, "depth": 1, "heads": 2}
SMALL = {
    "mlp": {**IMAGE, "width": 8},
    "mlp, flat and deep": {"image_shape": (7,), "classes": 5, "width": 8, "depth": 3},
    "digits_cnn": {**IMAGE, "width": 4},
    "resnet18": {**IMAGE, "width": 4},
    "resnet18, large images": {"image_shape": (64, 64, 3), "classes": 5, "width": 4},
    "transformer_lm": TEXT,
    "transformer_lm, tied": {**TEXT, "tied": True},
    "transformer_lm, rotary": {**TEXT, "positions": "rotary"},
    "vit": VIT,
    "vit, class token": {**VIT, "pool": "token"},
    "recommender": {"categories": 3, "dense": 2, "vocab": (5, 50, 500), "width": 4, "hidden": 8},
}


def _build(case: str, **more):
    import models

    return models.load(case.partition(",")[0], **{**SMALL[case], **more})


def _batch(model, classes: int, rows: int = 6):
    """Returns inputs and labels for `model`."""
    import numpy as np

    rng = np.random.default_rng(0)
    if isinstance(model.input, dict):
        x = {"categories": rng.integers(0, 5, (rows, 3)), "dense": rng.normal(size=(rows, 2)).astype("float32")}
        return x, rng.integers(0, 2, (rows,))
    shape = (rows, *model.input.shape[1:])
    if model.input.dtype == "int32":
        return rng.integers(0, classes, shape), rng.integers(0, classes, shape)
    return rng.normal(size=shape).astype("float32"), rng.integers(0, classes, (rows,))


def _classes(case: str) -> int:
    return SMALL[case].get("vocab", 5) if "transformer" in case else 5


@pytest.mark.parametrize("case", SMALL)
def test_learns_with_its_own_loss_and_metrics(case, cpu_devices):
    import keras

    import models

    keras.utils.set_random_seed(1)
    model = _build(case)
    assert not model.compiled
    assert not [layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    x, y = _batch(model, _classes(case))
    outputs = model(x)
    spec = models.find(case.partition(",")[0])
    if spec.task == "language_model":
        assert outputs.shape == (6, 6, 11)
    else:
        assert outputs.shape == (6, 1 if spec.task == "recommendation" else 5)
    model.compile(keras.optimizers.SGD(0.02), spec.loss(), metrics=spec.metrics())

    def loss() -> float:
        return float(spec.loss()(y, model(x, training=True)))  # as in training: batch statistics, not moving ones

    before = loss()
    for _ in range(3):
        logs = model.train_on_batch(x, y, return_dict=True)
    assert loss() < before
    assert 0 <= logs["accuracy"] <= 1


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_under_mixed_precision(case, policy, cpu_devices):
    import keras

    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = _build(case)
    finally:
        keras.mixed_precision.set_global_policy(before)
    assert {w.dtype for w in model.trainable_weights} == {"float32"}
    assert {layer.compute_dtype for layer in model.layers} > {"float32"}
    assert model(_batch(model, _classes(case))[0]).dtype == "float32"


@pytest.mark.parametrize("case", SMALL)
def test_save_and_load(case, cpu_devices, tmp_path):
    import keras
    import numpy as np

    model = _build(case)
    x, _ = _batch(model, _classes(case))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(x), loaded(x))


@pytest.mark.parametrize("case", [case for case in SMALL if "resnet" not in case])
def test_dropout_where_asked_for(case, cpu_devices):
    import numpy as np

    model = _build(case, dropout=0.5)
    x, _ = _batch(model, _classes(case))
    assert np.any(np.asarray(model(x, training=True)) != np.asarray(model(x, training=True)))
    np.testing.assert_array_equal(model(x), model(x))


@pytest.mark.slow
def test_resnet50(cpu_devices):
    import numpy as np

    import models

    model = models.load("resnet50", image_shape=(32, 32, 3), classes=5)
    assert model(np.zeros((1, 32, 32, 3), "float32")).shape == (1, 5)
    assert 23e6 < model.count_params() < 24e6


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_language_model_sees_no_later_token(positions, cpu_devices):
    import numpy as np

    model = _build("transformer_lm", positions=positions, depth=2)
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    changed = np.array([[1, 2, 3, 9, 9, 9]])
    first, second = np.asarray(model(tokens)), np.asarray(model(changed))
    np.testing.assert_allclose(first[:, :3], second[:, :3], atol=1e-6)
    assert np.abs(first[:, 3:] - second[:, 3:]).max() > 1e-4


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_language_model_knows_the_order(positions, cpu_devices):
    """Attention over a set would give the same sum; the last token is the same in both."""
    import numpy as np

    model = _build("transformer_lm", positions=positions)
    # Larger weights, so that attention is far from uniform, where the order would hardly show.
    model.set_weights([w * 8 if w.ndim > 1 else w for w in model.get_weights()])
    first, second = (np.asarray(model(np.array([t])))[0, -1] for t in ([1, 2, 3, 4, 5, 6], [5, 4, 3, 2, 1, 6]))
    assert np.abs(first - second).max() > 1e-4


def test_rotary_scores_depend_on_the_distance_alone(cpu_devices):
    import numpy as np

    from models.rotary import _rotate

    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 1, 8)).astype("float32")
    queries, keys = (np.asarray(_rotate(np.repeat(v, 9, axis=1)))[0, :, 0] for v in (query, key))
    scores = queries @ keys.T
    for distance in range(4):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert abs(scores[0, 0] - scores[0, 4]) > 1e-3


def test_recommender_has_sparse_gradients(cpu_devices):
    import tensorflow as tf

    model = _build("recommender")
    x, _ = _batch(model, 5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    gradients = tape.gradient(loss, [w.value for w in model.trainable_weights])
    assert sum(isinstance(g, tf.IndexedSlices) for g in gradients) == 3


@pytest.mark.parametrize(
    ("case", "bad", "said"),
    [
        ("mlp", {"width": 0}, "width=0 has to be an integer of at least 1"),
        ("mlp", {"depth": 1.5}, "depth=1.5"),
        ("mlp", {"width": True}, "width=True"),
        ("mlp", {"dropout": 1.0}, "dropout=1.0 has to be a number from 0 to below 1"),
        ("mlp", {"image_shape": 8}, "image_shape=8"),
        ("digits_cnn", {"classes": -1}, "classes=-1"),
        ("digits_cnn", {"image_shape": (8, 8)}, "has to be (height, width, channels)"),
        ("digits_cnn", {"image_shape": (1, 8, 1)}, "at least 2"),
        ("resnet18", {"synchronized": "yes"}, "synchronized='yes' has to be one of True, False"),
        ("transformer_lm", {"heads": 3}, "width=8 has to be a multiple of heads=3"),
        ("transformer_lm", {"vocab": 0}, "vocab=0"),
        ("transformer_lm", {"positions": "none"}, "positions='none' has to be one of 'learned', 'rotary'"),
        ("transformer_lm", {"positions": "rotary", "heads": 8}, "width=8 has to be a multiple of 2 * heads=16"),
        ("vit", {"patch": 3}, "multiples of 3"),
        ("vit", {"pool": "max"}, "pool='max' has to be one of 'mean', 'token'"),
        ("recommender", {"vocab": (5, 5)}, "one for each of categories=3"),
        ("recommender", {"vocab": (5, 0, 5)}, "vocab=(5, 0, 5)"),
    ],
)
def test_bad_sizes_are_refused(case, bad, said, cpu_devices):
    with pytest.raises(UsageError) as error:
        _build(case, **bad)
    assert said in str(error.value)
    assert isinstance(error.value, ValueError)


def test_resnet50_needs_images_of_32(cpu_devices):
    import models

    with pytest.raises(UsageError, match="at least 32"):
        models.load("resnet50", image_shape=(31, 32, 3))
