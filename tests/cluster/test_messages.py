"""The lines of the rendezvous: they survive the trip, and anything else is recognised as foreign."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.messages import Hello, Reply, find_conflict
from tfdist.errors import PeerError, UsageError

_VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1", "tfdist": "1"}


def _hello(index: int = 0, **changes: object) -> Hello:
    hello = Hello(index, ("a:1", "b:2", "c:3"), None, 10.0, 9.5, _VERSIONS)
    return dataclasses.replace(hello, **changes)


def test_lines_come_back_as_they_went():
    assert Hello.from_line(_hello(1, seed=7).to_line()) == _hello(1, seed=7)
    for reply in Reply(seed=3), Reply(usage_error="u"), Reply(peer_error="p"):
        assert reply.to_line().endswith(b"\n")
        assert Reply.from_line(reply.to_line()) == reply


def test_a_reply_gives_the_seed_or_raises():
    assert Reply(seed=0).agreed_seed() == 0
    with pytest.raises(UsageError, match="u"):
        Reply(usage_error="u").agreed_seed()
    with pytest.raises(PeerError, match="p"):
        Reply(peer_error="p").agreed_seed()


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": "other"},
        {"index": "0"},
        {"index": 3},
        {"index": True},
        {"workers": "a:1"},
        {"workers": [1, 2]},
        {"seed": "1"},
        {"left_s": None},
        {"left_s": -1},
        {"left_s": float("nan")},
        {"timeout_s": float("inf")},
        {"versions": ["1"]},
        {"versions": {"keras": 3}},
    ],
)
def test_a_malformed_hello_is_foreign(change):
    data = {**json.loads(_hello().to_line()), **change}
    assert Hello.from_line(json.dumps(data).encode()) is None


@given(st.binary(max_size=100) | st.text(max_size=50).map(str.encode) | st.just(b"[" * 100_000))
def test_garbage_is_foreign(line):
    assert Hello.from_line(line) is None
    assert Reply.from_line(line) is None


def test_agreement_is_no_conflict():
    assert find_conflict([_hello(0), _hello(1, seed=5), _hello(2, seed=5)]) is None


def test_says_which_worker_has_which_list():
    message = find_conflict([_hello(0), _hello(2), _hello(1, workers=("a:1", "b:9"))])
    assert "different lists of workers" in message
    assert "workers 0, 2: a:1, b:2, c:3" in message and "worker 1: a:1, b:9" in message


def test_says_which_worker_has_which_version_or_seed():
    message = find_conflict([_hello(0), _hello(1, versions={**_VERSIONS, "tensorflow": "2.20.0"})])
    assert "different versions of tensorflow (worker 0: 2.21.0; worker 1: 2.20.0)" in message
    message = find_conflict([_hello(0, seed=1), _hello(1), _hello(2, seed=2)])
    assert "different seeds (worker 0: 1; worker 2: 2)" in message


def test_two_workers_with_one_index():
    assert "2 processes say that they are worker 1 (b:2)" in find_conflict([_hello(0), _hello(1), _hello(1)])


def test_a_message_about_many_workers_stays_short():
    workers = tuple(f"host{index}:1" for index in range(500))
    hellos = [_hello(index, workers=workers[index:] + workers[:index]) for index in range(500)]
    assert len(find_conflict(hellos)) < 5000
