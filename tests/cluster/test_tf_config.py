"""TF_CONFIG: both forms are read; everything else is a UsageError that says what is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Cluster
from tfdist.errors import UsageError


def _read(config: object) -> Cluster:
    return Cluster.detect({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)})


def _config(cluster: object = None, task: object = None) -> dict:
    return {
        "cluster": {"worker": ["a:1", "b:2"]} if cluster is None else cluster,
        "task": {"type": "worker", "index": 0} if task is None else task,
    }


def test_reads_workers():
    assert _read(_config()) == Cluster(("a:1", "b:2"), 0, "TF_CONFIG")
    assert _read(_config(task={"type": "worker", "index": 1})).address == "b:2"


@pytest.mark.parametrize(("kind", "index", "place"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_the_chief_is_worker_0(kind, index, place):
    config = _config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, {"type": kind, "index": index})
    assert _read(config) == Cluster(("c:3", "a:1", "b:2"), place, "TF_CONFIG")


def test_a_lone_chief_and_unknown_extra_keys_are_fine():
    config = {
        **_config({"chief": ["c:3"]}, {"type": "chief", "index": 0, "trial": "1"}),
        "environment": "cloud",
    }
    assert _read(config) == Cluster(("c:3",), 0, "TF_CONFIG")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not JSON"),
        ("worker 0", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 10_000, "TF_CONFIG"),
        ("[]", "JSON object"),
        ("null", "JSON object"),
        ("{}", "'cluster' is missing"),
        ({"task": {}}, "'cluster' is missing"),
        ({"cluster": {"worker": ["a:1"]}}, "'task' is missing"),
        (_config(cluster=[]), "'cluster' is \\[\\]"),
        (_config(cluster={}), "lists no worker"),
        (_config(cluster={"worker": []}), "at least one address"),
        (_config(cluster={"worker": "a:1"}), "has to be a list"),
        (_config(cluster={"worker": {"0": "a:1"}}), "has to be a list"),
        (_config(cluster={"worker": ["a:1", None]}), "None is not of the form host:port"),
        (_config(cluster={"worker": ["a:1", "a:1"]}), "workers 0 and 1 have the same address"),
        (_config(cluster={"worker": ["a:1"], "chief": ["a:1"]}), "workers 0 and 1 have the same address"),
        (_config(cluster={"worker": ["a:70000"]}), "'a:70000' is not of the form host:port"),
        (_config(cluster={"worker": ["localhost"]}), "'localhost' is not of the form host:port"),
        (_config(cluster={"worker": ["a:1"], "chief": ["b:1", "c:1"]}), "2 chiefs"),
        (_config(cluster={"worker": ["a:1"], "ps": ["b:1"]}), "parameter servers are not supported"),
        (_config(cluster={"worker": ["a:1"], "bakers": ["b:1"]}), "only 'chief' and 'worker' are allowed"),
        (_config(task="worker 0"), "'task' is 'worker 0'"),
        (_config(task={"index": 0}), "the type None"),
        (_config(task={"type": ["worker"], "index": 0}), "only 'chief' and 'worker' are allowed"),
        (_config(task={"type": "ps", "index": 0}), "parameter servers are not supported"),
        (_config(task={"type": "evaluator", "index": 0}), "evaluator processes are not supported"),
        (_config(task={"type": "master", "index": 0}), "write 'chief'"),
        (_config(task={"type": "chief", "index": 0}), "'cluster' has no list 'chief'"),
        (_config(task={"type": "worker"}), "no 'index'"),
        (_config(task={"type": "worker", "index": "0"}), "no quotes"),
        (_config(task={"type": "worker", "index": True}), "has to be an integer"),
        (_config(task={"type": "worker", "index": 1.0}), "has to be an integer"),
        (_config(task={"type": "worker", "index": None}), "has to be an integer"),
        (_config(task={"type": "worker", "index": 2}), "from 0 to 1"),
        (_config(task={"type": "worker", "index": -1}), "from 0 to 1"),
    ],
)
def test_refuses(config, said):
    with pytest.raises(UsageError, match=said) as raised:
        _read(config)
    message = str(raised.value)
    assert message.startswith("TF_CONFIG=") and "has to look like {" in message and "unset it" in message
    assert len(message) < 1500 and message.isascii()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("a:1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_ADDRESSES = st.lists(st.from_regex(r"[a-c]:[0-9]{1,5}") | _JSON, max_size=3) | _JSON
_NEARLY_RIGHT = st.fixed_dictionaries(
    {
        "cluster": st.dictionaries(st.sampled_from(["worker", "chief", "ps"]), _ADDRESSES, max_size=3) | _JSON,
        "task": st.fixed_dictionaries(
            {"type": st.sampled_from(["worker", "chief", "ps"]) | _JSON, "index": st.integers(-1, 3) | _JSON}
        )
        | _JSON,
    }
)


@given(st.text(max_size=200) | _JSON.map(json.dumps) | _NEARLY_RIGHT.map(json.dumps))
def test_anything_gives_a_cluster_or_a_usage_error(text):
    try:
        cluster = Cluster.detect({"TF_CONFIG": text})
    except UsageError as error:
        assert "TF_CONFIG" in str(error)
    else:
        assert isinstance(cluster, Cluster)
