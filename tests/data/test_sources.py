"""The built-in data by name, against the files they come from, and everything that can be wrong with them."""

import gzip

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource, Datasets, Layout, check_labels, is_function, load, make_feed
from tfdist.errors import UsageError


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


def rows(source):
    """Returns the batch of all examples in their own order."""
    return source.gather(tf.range(source.num_examples, dtype=tf.int64))


def first_batch(source, seed=1):
    """Returns what the only replica gets first."""
    return next(iter(make_feed(source, Layout(1, 0, 1), seed=seed).dataset(0)))[0][0]


# digits


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    known = {(image.tobytes(), label) for image, label in zip((images / 16).astype("float32"), labels, strict=True)}
    digits = load("digits", batch_size=32)
    read = [rows(part) for part in (digits.train, digits.test)]
    assert [x.shape[1:] for x, _ in read] == [(8, 8, 1)] * 2
    assert digits.num_classes == 10
    found = [(x.numpy().tobytes(), int(y)) for xs, ys in read for x, y in zip(xs, ys, strict=True)]
    assert len(found) == len(labels) == 1797 and set(found) == known
    assert digits.test.num_examples == 360
    counts = np.bincount(read[1][1], minlength=10) / np.bincount(labels, minlength=10)
    np.testing.assert_allclose(counts, 0.2, atol=0.01)


# bytes


def test_bytes_are_windows_and_the_bytes_that_follow(tmp_path):
    content = bytes(range(200)) * 3
    (tmp_path / "text").write_bytes(content)
    data = load(f"bytes:{tmp_path / 'text'},seq_len=10", batch_size=4)
    x, y = rows(data.train)
    assert x.dtype == y.dtype == tf.int32
    joined = bytes(x.numpy().astype("uint8").ravel())
    assert joined == content[: len(joined)] and len(joined) == 530
    assert bytes(y.numpy().astype("uint8").ravel()) == content[1 : len(joined) + 1]
    vx, _ = rows(data.validation)
    assert bytes(vx.numpy().astype("uint8").ravel()) == content[540:590]
    assert not data.validation.shuffle and data.num_classes == 256


def test_bytes_of_a_folder_are_joined_in_the_order_of_their_paths(tmp_path):
    for name, text in (("b.txt", b"22222"), ("a/z.txt", b"11111"), ("c.txt", b"333333")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    x, _ = rows(load(f"bytes:{tmp_path},seq_len=3", batch_size=2).train)
    assert bytes(x.numpy().astype("uint8").ravel()) == b"111112222233333"


# tfrecord


def write_records(path, values, **options):
    with tf.io.TFRecordWriter(str(path), **options) as writer:
        for value in values:
            features = {
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=[value, value + 0.5])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[value % 3])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def test_records_of_several_files_equal_tensorflows_reader(tmp_path):
    write_records(tmp_path / "b.tfrecord", range(7, 9))
    write_records(tmp_path / "a.tfrecord", range(7))
    write_records(tmp_path / "c.tfrecord", [])
    source = load(f"tfrecord:{tmp_path}/*.tfrecord", batch_size=4).train
    x, y = rows(source)
    files = [str(tmp_path / f"{name}.tfrecord") for name in "abc"]
    features = {"image": tf.io.FixedLenFeature([2], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}
    stock = [tf.io.parse_single_example(record, features) for record in tf.data.TFRecordDataset(files)]
    np.testing.assert_array_equal(x, [record["image"] for record in stock])
    np.testing.assert_array_equal(y, [record["label"] for record in stock])


def test_records_are_read_once_by_all_workers(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(23))
    from tfdist.data import audit

    report = audit(load(f"tfrecord:{tmp_path}/a.tfrecord", batch_size=5, seed=1).train, workers=3)
    assert report.ok and report.num_examples == 23


def test_records_larger_than_the_read_buffer(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "big.tfrecord")) as writer:
        for value in range(3):
            floats = tf.train.FloatList(value=np.full(700_000, value, np.float32))
            feature = {"x": tf.train.Feature(float_list=floats)}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    (x,) = rows(load(f"tfrecord:{tmp_path}/big.tfrecord", batch_size=1).train)
    assert x.shape == (3, 700_000)
    np.testing.assert_array_equal(x[:, -1], [0, 1, 2])


def test_a_damaged_record_fails_when_it_is_read(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_records(path, range(3))
    content = bytearray(path.read_bytes())
    content[-10] ^= 1  # in the data of the last record, which the index does not look at
    path.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match="corrupted"):
        rows(load(f"tfrecord:{path}", batch_size=1).train)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-1], "is cut off in the record at byte"),
        (lambda raw: raw + b"12345", "is cut off in the record at byte"),
        (lambda raw: b"\x01" + raw[1:], "is damaged, or no TFRecord file, at byte 0"),
        (lambda raw: b"just some text in a file", "no TFRecord file"),
        (lambda raw: gzip.compress(raw), "compressed with gzip"),
        (lambda raw: b"", "hold no records"),
    ],
)
def test_damaged_files_are_named_before_training(tmp_path, damage, words):
    path = tmp_path / "a.tfrecord"
    write_records(path, range(3))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=words):
        load(f"tfrecord:{path}", batch_size=1)


def test_records_that_are_no_examples(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(b"\xff\xff\xff")
    with pytest.raises(UsageError, match="no tf.train.Example"):
        load(f"tfrecord:{tmp_path}/a.tfrecord", batch_size=1)


# synthetic


@pytest.mark.parametrize(
    ("spec", "x_shape", "classes"),
    [
        ("synthetic:", (28, 28, 1), 10),
        ("synthetic:examples=64,shape=4x6x3,classes=5", (4, 6, 3), 5),
        ("synthetic:kind=tokens,examples=64,seq_len=9,vocab=17", (9,), 17),
    ],
)
def test_synthetic_data(spec, x_shape, classes):
    data = load(spec, batch_size=16)
    x, y = rows(data.train)
    assert x.shape[1:] == x_shape and data.num_classes == classes
    assert 0 <= int(tf.reduce_min(y)) and int(tf.reduce_max(y)) < classes
    again, _ = rows(load(spec, batch_size=8).train)
    np.testing.assert_array_equal(x, again)
    assert data.test.num_examples == len(x) // 8


def test_synthetic_recommender():
    x, y = first_batch(load("synthetic:kind=recommender,examples=80,features=3,vocab=7,dense=2", batch_size=16).train)
    assert x["categories"].shape == (16, 3) and x["dense"].shape == (16, 2)
    assert set(y.numpy()) == {0, 1}


# functions of the user's


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(
        """
import numpy as np
import tensorflow as tf
from tfdist.data import ArraySource, Datasets

def arrays():
    return np.zeros((6, 2), "float32"), np.arange(6)

def sized(batch_size, seed):
    return ArraySource(np.arange(float(seed)), batch_size=batch_size)

def pair(batch_size):
    return tf.data.Dataset.range(4).batch(batch_size), tf.data.Dataset.range(2).batch(1)

def whole(batch_size):
    return Datasets(ArraySource(np.zeros(3), batch_size=batch_size))

def nonsense():
    return 3

number = 4
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_functions_give_data_in_every_form(module):
    assert load("own_data:arrays", batch_size=4).train.steps_per_epoch == 2
    assert load("own_data:sized", batch_size=5, seed=12).train.num_examples == 12
    assert load("own_data:pair", batch_size=2).test.num_batches == 2
    assert isinstance(load("own_data:whole", batch_size=2), Datasets)
    assert is_function("own_data:arrays") and not is_function("bytes:own_data") and not is_function("digits")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("digit", "did you mean 'digits'"),
        ("digits:3", "digits takes no parameters"),
        ("bytes:", "the path is missing"),
        ("bytes:/does/not/exist", "there is no file or folder '/does/not/exist'"),
        ("bytes:empty", "'empty' is empty"),
        ("bytes:folder", "holds no files"),
        ("bytes:short,seq_len=50", "holds 5 bytes, and one window needs seq_len . 1 = 51"),
        ("bytes:short,seq_len=0", "seq_len=0 has to be at least 1"),
        ("bytes:short,seq_len=x", "seq_len='x' has to be an integer"),
        ("tfrecord:*.none", r"no file matches '\*.none'"),
        ("synthetic:exampels=3", "did you mean 'examples'"),
        ("synthetic:examples=0", "examples=0 has to be at least 1"),
        ("synthetic:classes=1", "classes=1 has to be at least 2"),
        ("synthetic:shape=3x", "sizes joined by x"),
        ("synthetic:kind=sound", "choose one of images, tokens, recommender"),
        ("own_dat:arrays", "there is no module 'own_dat'"),
        ("own_data:array", "did you mean 'arrays'"),
        ("own_data:number", "has no function 'number'"),
        ("own_data:nonsense", "returned int"),
        ("own_data:", "choose digits, bytes:PATH"),
        (":arrays", "choose digits, bytes:PATH"),
    ],
)
def test_wrong_specs_name_the_spec_and_the_fix(module, spec, words):
    (module / "empty").touch()
    (module / "folder").mkdir()
    (module / "short").write_bytes(b"12345")
    with pytest.raises(UsageError, match=words) as error:
        load(spec, batch_size=2)
    assert repr(spec) in str(error.value)


def test_an_error_within_the_users_module_is_their_own(module):
    (module / "broken_data.py").write_text("import does_not_exist")
    with pytest.raises(ModuleNotFoundError, match="does_not_exist"):
        load("broken_data:make", batch_size=1)


def test_labels_outside_of_the_models_classes_are_named():
    def labelled(labels):
        source = ArraySource((np.zeros((4, 1)), np.array(labels)), batch_size=2)
        return Datasets(source, name="mine:data")

    check_labels(labelled([0, 1, 2, 2]), 3)
    check_labels(labelled([0.0, 7.0, 2.0, 2.0]), 3)
    with pytest.raises(UsageError, match="train label of example 2 is 3, but the model has 3 classes, 0 to 2"):
        check_labels(labelled([0, 1, 3, -1]), 3)
    with pytest.raises(UsageError, match="label of example 0 is -1"):
        check_labels(labelled([-1, 1, 1, 1]), 3)
