"""Finding models by name or path, and fitting their sizes to data."""

import sys
import textwrap
from types import SimpleNamespace

import pytest

from tfdist.errors import UsageError


@pytest.fixture
def models(cpu_devices):
    import models

    return models


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A working directory with a module `own_code_<test>`; returns its name."""
    name = f"own_code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            import keras
            import models

            def net(width, classes=3):
                return keras.Sequential([keras.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(classes)])

            def anything(**sizes):
                return net(2)

            def nothing():
                return "model"

            number = 3
            spec = models.ModelSpec("own", net, lambda: "mse", lambda: ["mae"])
            """
        )
    )
    (tmp_path / f"{name}_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_names_are_those_of_the_design(models):
    assert list(models.BUILTIN) == [
        "mlp",
        "digits_cnn",
        "resnet18",
        "resnet50",
        "transformer_lm",
        "vit",
        "recommender",
    ]
    assert all(name == spec.name for name, spec in models.BUILTIN.items())


def test_losses_and_metrics_are_new_each_time(models):
    spec = models.BUILTIN["mlp"]
    assert spec.loss() is not spec.loss()
    assert [metric.name for metric in spec.metrics()] == ["accuracy"]
    assert [metric.name for metric in models.BUILTIN["recommender"].metrics()] == ["accuracy", "auc"]


def test_accuracy_of_the_recommender_is_of_logits(models):
    accuracy, auc = models.BUILTIN["recommender"].metrics()
    for metric in (accuracy, auc):
        metric.update_state([[0.0], [1.0], [1.0], [0.0]], [[-3.0], [0.2], [-0.2], [-0.1]])
    assert float(accuracy.result()) == 0.75
    assert 0.7 < float(auc.result()) < 0.8


def test_own_functions_and_specs(models, own_code):
    assert models.load(f"{own_code}:net", width=5).output_shape == (None, 3)
    assert models.load(f"{own_code}:anything", odd=1).output_shape == (None, 3)
    spec = models.find(f"{own_code}:spec")
    assert spec.loss() == "mse" and spec.metrics() == ["mae"]


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("digit_cnn", {}, "--model='digit_cnn': choose one of mlp, digits_cnn, "),
        ("digit_cnn", {}, "did you mean 'digits_cnn'?"),
        ("", {}, "choose one of"),
        ("no_such_module:f", {}, "there is no module 'no_such_module'; it has to be installed or in the working"),
        ("models.mine:f", {}, "there is no module 'models.mine' in the package at "),
        ("..up:f", {}, "there is no module '..up'"),
        ("OWN:nett", {}, "did you mean 'net'?"),
        ("OWN:number", {}, "number is int"),
        ("OWN:nothing", {}, "returned str; a keras.Model is needed"),
        ("OWN:net", {}, "needs width; add width=..."),
        ("OWN:net", {"widht": 3}, "has no 'widht'; it takes width, classes; did you mean 'width'?"),
        ("mlp", {"width": 0}, "--model_config, mlp: width=0"),
    ],
)
def test_what_is_not_there_is_refused(models, own_code, name, sizes, said):
    with pytest.raises(UsageError) as error:
        models.load(name.replace("OWN", own_code), **sizes)
    assert said in str(error.value)


def test_a_fault_within_own_code_keeps_its_traceback(models, own_code):
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        models.load(f"{own_code}_broken:net")


def _data(x, classes=None):
    import tensorflow as tf

    return SimpleNamespace(element_spec=(x, tf.TensorSpec((), tf.int32)), num_classes=classes)


def _spec(*shape, dtype="float32"):
    import tensorflow as tf

    return tf.TensorSpec(shape, dtype)


def test_sizes_come_from_the_data(models):
    def sizes(name, x, found=None, **given):
        return models.config_for(models.find(name), _data(x, found), given)

    image, text = _spec(8, 8, 1), _spec(32, dtype="int32")
    features = {"categories": _spec(5, dtype="int64"), "dense": _spec(3)}
    assert sizes("digits_cnn", image, 10) == {"image_shape": (8, 8, 1), "classes": 10}
    assert sizes("mlp", _spec(20), 7) == {"image_shape": (20,), "classes": 7}
    assert sizes("vit", image, 10, width=64, classes=12) == {"image_shape": (8, 8, 1), "classes": 12, "width": 64}
    assert sizes("transformer_lm", text, 256) == {"seq_len": 32, "vocab": 256}
    assert sizes("recommender", features, 2) == {"categories": 5, "dense": 3}
    assert models.config_for(models.find("mlp"), object(), {"width": 3}) == {"width": 3}


def test_own_functions_get_what_they_take(models, own_code):
    spec = models.find(f"{own_code}:net")
    assert models.config_for(spec, _data(_spec(8, 8, 1), 10), {"width": 2}) == {"width": 2, "classes": 10}


@pytest.mark.parametrize(
    ("name", "x", "classes", "given", "said"),
    [
        ("digits_cnn", ((32,), "int32"), 256, {}, "--model='digits_cnn' does not fit --data: it takes images"),
        ("digits_cnn", ((8, 8), "float32"), 10, {}, "(height, width, channels)"),
        ("digits_cnn", ((None, 8, 1), "float32"), 10, {}, "does not fit"),
        ("transformer_lm", ((8, 8, 1), "float32"), 10, {}, "integer tokens of shape (seq_len,)"),
        ("recommender", ((8,), "float32"), 10, {}, '{"categories": '),
        ("mlp", ((8,), "float32"), 10, {"classes": 9}, "classes=9, but the labels go from 0 to 9"),
        ("transformer_lm", ((8,), "int32"), 256, {"vocab": 100}, "at least vocab=256 is needed"),
    ],
)
def test_data_of_another_kind_is_refused(models, name, x, classes, given, said):
    with pytest.raises(UsageError) as error:
        models.config_for(models.find(name), _data(_spec(*x[0], dtype=x[1]), classes), given)
    assert said in str(error.value)
