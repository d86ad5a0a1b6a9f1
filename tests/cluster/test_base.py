"""Cluster: what it accepts, what it says of itself."""

import dataclasses
import json

import pytest

from tfdist.cluster import Cluster
from tfdist.errors import UsageError


def test_says_who_is_who():
    cluster = Cluster(("host1:1", "host2:65535", "[::1]:8080"), 1, "test")
    assert cluster.num_workers == 3
    assert not cluster.is_chief
    assert cluster.address == "host2:65535"
    assert not cluster.is_local
    assert json.loads(cluster.tf_config()) == {
        "cluster": {"worker": ["host1:1", "host2:65535", "[::1]:8080"]},
        "task": {"type": "worker", "index": 1},
    }


def test_tf_config_is_read_back_as_the_same_cluster():
    cluster = Cluster(("a:1", "b:2"), 1, "TF_CONFIG")
    assert Cluster.detect({"TF_CONFIG": cluster.tf_config()}) == cluster


def test_local_cluster_has_one_worker_and_no_port():
    cluster = Cluster.local()
    assert (cluster.num_workers, cluster.is_chief, cluster.is_local) == (1, True, True)
    assert cluster.tf_config() == "{}"


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  "}, {"OTHER": "x"}])
def test_detect_falls_back_to_local(environ):
    assert Cluster.detect(environ) == Cluster.local()


def test_detect_reads_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", Cluster(("a:1",), 0, "x").tf_config())
    assert Cluster.detect() == Cluster(("a:1",), 0, "TF_CONFIG")


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cluster.local().index = 1


@pytest.mark.parametrize(
    ("workers", "index", "said"),
    [
        ((), 0, "at least one"),
        (["a:1"], 0, "tuple"),
        ("a:1", 0, "tuple"),
        (("a:1",), 1, "from 0 to 0"),
        (("a:1", "b:2"), -1, "from 0 to 1"),
        (("a:1",), True, "integer"),
        (("a:1",), "0", "integer"),
        (("a",), 0, "host:port"),
        (("localhost", "a:1"), 0, "host:port"),
        (("a:0",), 0, "1 to 65535"),
        (("a:65536",), 0, "1 to 65535"),
        (("a:01",), 0, "host:port"),
        (("a:1\n",), 0, "host:port"),
        (("a:1٣",), 0, "host:port"),
        ((":1",), 0, "host:port"),
        (("::1:1",), 0, "host:port"),
        (("http://a:1",), 0, "host:port"),
        ((5,), 0, "host:port"),
        (("a:1", "b:2", "A:1"), 0, "workers 0 and 2 have the same address"),
    ],
)
def test_refuses(workers, index, said):
    with pytest.raises(UsageError, match=said):
        Cluster(workers, index, "test")
