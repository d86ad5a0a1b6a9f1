"""GPUs of a host that several workers share: who divides them, into what, and who has too few."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Agreement, Cluster, rendezvous
from tfdist.cluster.gpus import SeenGPUs, find_shortage, own_gpus, sharing
from tfdist.cluster.messages import Hello
from tfdist.errors import UsageError
from tfdist.strategy import _choose_gpus


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_are_equal_and_disjoint(num_gpus, local_size):
    shares = [own_gpus(num_gpus, rank, local_size) for rank in range(local_size)]
    taken = [gpu for share in shares for gpu in share]
    assert {len(share) for share in shares} == {num_gpus // local_size}
    assert taken == list(range(num_gpus // local_size * local_size))


def test_local_places():
    clusters = [Cluster(("a:1", "B:1", "b:2", "[fe80::1]:3", "a:2"), index, "test") for index in range(5)]
    assert [(cluster.local_rank, cluster.local_size) for cluster in clusters] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (0, 1),
        (1, 2),
    ]
    assert (Cluster.local().local_rank, Cluster.local().local_size) == (0, 1)


@pytest.mark.parametrize(
    ("environ", "count", "pool"),
    [
        ({}, 4, "all"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, "0,1"),
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, 1, None),
        ({"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1", "CUDA_VISIBLE_DEVICES": "0"}, 1, None),
        ({"SLURM_PROCID": "0", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 1, None),
        ({"SLURM_PROCID": "0", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, "0,1,2,3"),
    ],
)
def test_whose_gpus_a_worker_sees(environ, count, pool):
    assert SeenGPUs.detect(count, environ) == SeenGPUs(count, pool)


def test_workers_that_see_the_same_gpus_divide_them():
    hosts = [(0, 1), (2, 3), (4,)]
    same = {worker: SeenGPUs(2, "all") for worker in range(5)}
    assert sharing(hosts, same) == (0, 1, 2, 3) and find_shortage(hosts, same) is None
    by_hand = {**same, 0: SeenGPUs(1, "0"), 1: SeenGPUs(1, "1")}
    assert sharing(hosts, by_hand) == (2, 3) and find_shortage(hosts, by_hand) is None
    by_slurm = {worker: SeenGPUs(1, None) for worker in range(5)}
    assert sharing(hosts, by_slurm) == () and find_shortage(hosts, by_slurm) is None
    without = {worker: SeenGPUs(0, "-1") for worker in range(5)}
    assert sharing(hosts, without) == () and find_shortage(hosts, without) is None


def test_a_shortage_says_where_and_the_fix():
    what, fix = find_shortage([(0,), (1, 2)], {worker: SeenGPUs(1, "3") for worker in range(3)})
    assert what == "2 workers (1, 2) are on one host, but they see only 1 GPU(s) there (CUDA_VISIBLE_DEVICES=3)"
    assert fix.startswith("Start at most 1 worker(s) there, ")


def test_devices_count_within_the_share():
    share = own_gpus(8, 1, 2)
    assert _choose_gpus(share, None, None) == [4, 5, 6, 7]
    assert _choose_gpus(share, None, 2) == [4, 5]
    assert _choose_gpus(share, ["GPU:3", "/device:GPU:0"], None) == [7, 4]
    with pytest.raises(UsageError, match="num_devices=5: this worker's share of its host's GPUs has 4"):
        _choose_gpus(share, None, 5)
    with pytest.raises(UsageError, match=r"devices=\['GPU:4'\]: this worker's share.*GPU:0 to GPU:3"):
        _choose_gpus(share, ["GPU:4"], None)


def _meet(meet_all, workers, gpus):
    return meet_all([lambda i=i: rendezvous(Cluster(workers, i, "test"), timeout_s=10, gpus=gpus[i]) for i in (0, 1)])


def test_all_workers_hear_who_divides_gpus(addresses, meet_all):
    got = _meet(meet_all, addresses(2), [SeenGPUs(2, "all")] * 2)
    assert got == [got[0]] * 2 and isinstance(got[0], Agreement) and got[0].sharing_gpus == (0, 1)
    got = _meet(meet_all, addresses(2), [SeenGPUs(1, "0"), SeenGPUs(1, "1")])
    assert got == [got[0]] * 2 and got[0].sharing_gpus == ()


def test_all_workers_hear_of_a_shortage(addresses, meet_all):
    got = _meet(meet_all, addresses(2), [SeenGPUs(1, "all")] * 2)
    assert [type(error) for error in got] == [UsageError] * 2
    assert all("they see only 1 GPU(s)" in str(error) and ". Start at most 1" in str(error) for error in got)


@pytest.mark.parametrize("gpus", [None, 3, {"count": -1, "pool": None}, {"count": "1"}, {"count": 1, "pool": 5}])
def test_malformed_gpus_are_foreign(gpus):
    hello = Hello(0, ("a:1", "b:2"), None, 10.0, 9.5, {}, gpus=SeenGPUs(2, "all"))
    assert Hello.from_line(hello.to_line()) == hello
    data = {**json.loads(hello.to_line()), "gpus": gpus}
    assert Hello.from_line(json.dumps(data).encode()) is None
    assert dataclasses.asdict(hello)["gpus"] == {"count": 2, "pool": "all"}


def test_another_release_is_heard():
    data = json.loads(Hello(0, ("a:1", "b:2"), None, 10.0, 9.5, {}).to_line())
    del data["gpus"]
    assert Hello.from_line(json.dumps(data).encode()).gpus == SeenGPUs(0, None)
