"""The checks of `tfdist doctor` that are functions of facts, against faults written by hand."""

from dataclasses import replace

import pytest

from tfdist.diagnostics.doctor import checks, links
from tfdist.diagnostics.doctor.facts import Facts, unmet
from tfdist.diagnostics.doctor.report import Link, Status, workers
from tfdist.diagnostics.doctor.topology import check_collective, parse_topology
from tfdist.diagnostics.probes import Gpu, Space, listed_gpus, used_memory, visible_gpus, within_group
from tfdist.errors import PeerError

_VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1", "tfdist": "0.1.0", "numpy": "2.4.0", "mpi4py": "4.1.0"}
_BIG = Space(64 << 30, 128 << 30)
_CPU = Facts("a", "1", "3.11.7", _VERSIONS, memory=_BIG, shared_memory=_BIG, disk=_BIG)
_H100 = replace(_CPU, gpus=("H100", "H100"), gpu_uuids=("GPU-1", "GPU-2"), gpu_numbers=(0, 1), gpu_pool="all")

_NVLINK = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t48-95\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
_PCIE = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\tSYS\t0-15\t0
GPU1\tPHB\t X \tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \t16-31\t1
"""
_ONE = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"


def test_nothing_is_wrong_with_equal_workers():
    for facts in ({0: _CPU}, {0: _CPU, 1: _CPU}):
        found = {finding.check: finding.status for finding in checks.all_checks(facts, [tuple(facts)])}
        assert found.pop("GPU memory") is Status.SKIPPED and set(found.values()) == {Status.OK}


@pytest.mark.parametrize(
    ("second", "status", "said"),
    [
        ({"tensorflow": "2.20.0"}, Status.FAILED, "tensorflow differs (worker 0: 2.21.0; worker 1: 2.20.0)"),
        ({"numpy": "1.26.4"}, Status.FAILED, "numpy differs (worker 0: 2.4.0; worker 1: 1.26.4)"),
        ({"mpi4py": "not installed"}, Status.WARNING, "mpi4py differs (worker 0: 4.1.0; worker 1: not installed)"),
    ],
    ids=str,
)
def test_versions_that_differ(second, status, said):
    finding = checks.check_versions({0: _CPU, 1: replace(_CPU, versions={**_VERSIONS, **second})})
    assert (finding.status, finding.found) == (status, said)
    assert next(iter(second)) in finding.fix


def test_another_python_is_a_warning_and_another_patch_is_none():
    assert checks.check_versions({0: _CPU, 1: replace(_CPU, python="3.11.9")}).status is Status.OK
    found = checks.check_versions({0: _CPU, 1: replace(_CPU, python="3.12.1")})
    assert found.status is Status.WARNING and found.found == "Python differs (worker 0: 3.11; worker 1: 3.12)"


def test_what_tfdist_asks_for_and_is_not_there():
    asked = ("tensorflow<2.22,>=2.21", "keras>=3.12", "numpy", "tomli; python_version < '3'", "scipy>=1.11")
    there = {"tensorflow": "2.20.0", "keras": "3.12.0", "numpy": "2.0", "scipy": "not installed"}
    wrong = unmet(asked, there)
    assert wrong == ("tensorflow is 2.20.0, and tfdist asks for tensorflow<2.22,>=2.21", "scipy is not installed")
    finding = checks.check_versions({0: _CPU, 1: replace(_CPU, unmet=wrong)})
    assert finding.status is Status.FAILED and finding.found.startswith("worker 1: tensorflow is 2.20.0")
    assert unmet(asked, {**there, "tensorflow": "2.21.3", "scipy": "1.11.0"}) == ()


def test_devices_that_differ():
    apart = [(0,), (1,)]
    finding = checks.check_devices({0: _H100, 1: replace(_H100, gpus=("H100",), gpu_uuids=("GPU-3",))}, apart)
    assert finding.status is Status.FAILED and finding.found == "worker 0: 2 x H100; worker 1: 1 x H100"
    other = replace(_H100, gpus=("A100", "A100"), gpu_uuids=("GPU-3", "GPU-4"))
    finding = checks.check_devices({0: _H100, 1: other}, apart)
    assert finding.status is Status.WARNING and "worker 1: 2 x A100" in finding.found


def test_workers_of_a_host_divide_its_gpus():
    one = replace(_H100, gpus=("H100",), gpu_uuids=("GPU-3",))
    finding = checks.check_devices({0: _H100, 1: _H100, 2: one}, [(0, 1), (2,)])
    assert finding.status is Status.OK
    assert finding.found == "1 x H100 on each worker; workers 0, 1 divide the GPUs of their host"
    facts = {0: _H100, 1: _H100, 2: replace(_H100, gpu_uuids=("GPU-3", "GPU-4"))}
    finding = checks.check_devices(facts, [(0, 1), (2,)])
    assert finding.status is Status.FAILED
    assert finding.found == "workers 0, 1: 1 x H100; worker 2: 2 x H100"
    finding = checks.check_devices({0: _H100, 1: replace(_H100, gpu_uuids=())}, [(0, 1)])  # nvidia-smi is missing
    assert finding.status is Status.OK


def test_a_host_with_fewer_gpus_than_workers():
    finding = checks.check_devices(dict.fromkeys(range(3), _H100), [(0, 1, 2)])
    assert finding.status is Status.FAILED
    assert finding.found == (
        "3 workers (0, 1, 2) are on one host, but they see only 2 GPU(s) there (CUDA_VISIBLE_DEVICES=all)"
    )
    assert finding.fix.startswith("Start at most 2 worker(s) there, each worker with a CUDA_VISIBLE_DEVICES of its own")


@pytest.mark.parametrize(
    ("hosts", "first", "second"),
    [
        ([(0,), (1,)], {}, {}),  # one host under two names: they do not know that they have to divide
        ([(0, 1)], {"gpu_pool": "0,1"}, {"gpu_pool": "1,2", "gpu_uuids": ("GPU-2", "GPU-3")}),
    ],
    ids=["two names", "two lists"],
)
def test_gpus_that_two_workers_would_use(hosts, first, second):
    finding = checks.check_devices({0: replace(_H100, **first), 1: replace(_H100, **second)}, hosts)
    assert finding.status is Status.FAILED and finding.found == "workers 0, 1 use the same GPU"
    assert "CUDA_VISIBLE_DEVICES" in finding.fix and "name" in finding.fix
    third = {0: replace(_H100, gpu_pool="0,1"), 1: replace(_H100, gpu_pool="2,3", gpu_uuids=("GPU-3", "GPU-4"))}
    assert checks.check_devices(third, [(0, 1)]).found == "2 x H100 on each worker"


def test_cores_that_differ_and_gpus_that_are_in_use():
    facts = {0: replace(_CPU, cpu="x", cores=8), 1: replace(_CPU, cpu="x", cores=4)}
    finding = checks.check_devices(facts, [(0, 1)])
    assert finding.status is Status.WARNING and finding.found == "worker 0: 8 core(s) of x; worker 1: 4 core(s) of x"
    used = used_memory("0, 17\n1, 40000\n2, [N/A]\n", [0, 1, 2])
    assert used == (17, 40000) and used_memory(None, [0]) == ()
    assert checks.check_gpu_memory({0: replace(_H100, gpu_used_mb=(17, 3))}).status is Status.OK
    finding = checks.check_gpu_memory({0: replace(_H100, gpu_used_mb=(17,)), 1: replace(_H100, gpu_used_mb=used)})
    assert finding.status is Status.WARNING and finding.found == "worker 1: 40000 MB of a GPU are taken"


def test_tensorflow_that_is_broken_or_sees_no_gpu():
    finding = checks.check_tensorflow({0: _H100, 1: replace(_H100, gpus=())})
    assert finding.status is Status.FAILED
    assert finding.found == "worker 1: the driver lists 2 GPU(s), TensorFlow sees 0"
    finding = checks.check_tensorflow({0: _CPU, 1: replace(_CPU, tensorflow_error="ImportError: no libfoo")})
    assert finding.status is Status.FAILED and finding.found == "worker 1: ImportError: no libfoo"


@pytest.mark.parametrize(
    ("check", "field", "free", "status"),
    [
        (checks.check_memory, "memory", 3 << 30, Status.OK),
        (checks.check_memory, "memory", 1 << 30, Status.WARNING),
        (checks.check_memory, "memory", 1 << 20, Status.FAILED),
        (checks.check_memory, "memory", None, Status.OK),  # the other worker's is known
        (checks.check_disk, "disk", 1 << 30, Status.WARNING),
        (checks.check_disk, "disk", 1 << 20, Status.FAILED),
        (checks.check_shared_memory, "shared_memory", 64 << 20, Status.WARNING),
    ],
)
def test_space(check, field, free, status):
    space = None if free is None else Space(free, 128 << 30)
    finding = check({0: _CPU, 1: replace(_CPU, **{field: space})})
    assert finding.status is status and bool(finding.fix) == (status is not Status.OK)
    assert status is Status.OK or "on worker 1, the least" in finding.found


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "max\n", "memory.current": "5"}, Space(60, 100)),
        ({"memory.max": "50\n", "memory.current": "30\n", "memory.stat": "anon 1\ninactive_file 10\n"}, Space(30, 50)),
        ({"memory.limit_in_bytes": "40", "memory.usage_in_bytes": "10", "memory.stat": "x 1\n"}, Space(30, 40)),
        ({"memory.limit_in_bytes": str(2**62), "memory.usage_in_bytes": "10", "memory.stat": ""}, Space(60, 100)),
        ({}, Space(60, 100)),
    ],
)
def test_the_memory_that_a_control_group_leaves(files, left, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert within_group(Space(60, 100), tmp_path) == left


def test_workers_are_named_in_runs():
    assert [workers(some) for some in ([3], [1, 0], [0, 1, 2, 4, 7, 8, 9])] == [
        "worker 3",
        "workers 0, 1",
        "workers 0-2, 4, 7-9",
    ]


def test_topologies_are_read():
    nvlink = parse_topology(_NVLINK)
    assert nvlink.gpus == 4 and nvlink.nvlink and len(nvlink.links) == 6
    pcie = parse_topology(_PCIE)
    assert pcie.links == {(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"} and not pcie.nvlink
    assert parse_topology(_ONE).links == {}
    for text in ("", "No devices were found\n", "GPU0 GPU1\nGPU0 X\n", _PCIE.replace("PHB", "???")):
        assert parse_topology(text) is None


def test_the_collective_that_follows():
    assert check_collective({0: _CPU, 1: _CPU}).found.startswith("TensorFlow's ring on CPUs, within one machine")
    assert "between 2 machines" in check_collective({0: _CPU, 1: replace(_CPU, machine="2")}).found
    four = replace(_H100, gpus=("H100",) * 4, gpu_numbers=(0, 1, 2, 3), topology=_NVLINK)
    found = check_collective({0: four})
    assert (found.status, found.found) == (Status.OK, "worker 0: NCCL over NVLink (NV18)")
    found = check_collective({0: four, 1: replace(four, machine="2")})
    assert found.found.endswith("NCCL over the network between 2 machines")
    near = check_collective({0: replace(_H100, topology=_PCIE)})  # GPUs 0 and 1 only
    assert (near.status, near.found) == (Status.OK, "worker 0: NCCL over PCIe (PHB)")
    far = check_collective({0: replace(_H100, gpu_numbers=(0, 2), topology=_PCIE)})
    assert far.status is Status.WARNING and "GPU 0 and GPU 2: PCIe and the link between CPU sockets" in far.found
    mixed = check_collective({0: _H100, 1: _CPU})
    assert mixed.status is Status.FAILED and mixed.found.startswith("worker 1 has no GPU")


def test_gpus_of_a_driver_and_those_that_cuda_shows():
    gpus = listed_gpus("GPU 0: NVIDIA H200 (UUID: GPU-aa-1)\nGPU 1: NVIDIA H200 (UUID: GPU-bb-2)\n")
    assert gpus == (Gpu(0, "NVIDIA H200", "GPU-aa-1"), Gpu(1, "NVIDIA H200", "GPU-bb-2"))
    assert listed_gpus(None) == ()
    for variable, numbers in {
        None: [0, 1],
        "1": [1],
        "1,0": [1, 0],
        "GPU-bb": [1],
        "": [],
        "-1": [],
        "1,7,0": [1],
    }.items():
        assert [gpu.number for gpu in visible_gpus(gpus, variable)] == numbers


@pytest.mark.parametrize(
    ("skew", "status", "said"),
    [
        (0.03, Status.OK, ""),
        (-0.03, Status.OK, ""),
        (0.4, Status.WARNING, "worker 1 is 0.4 s ahead of worker 0"),
        (-5.0, Status.FAILED, "worker 1 is 5 s behind worker 0"),
    ],
)
def test_a_planted_clock_skew(skew, status, said):
    # Five slow round trips, whose answers were all late, and a quick one.
    trips = [(10.0 * i, 10.0 * i + 2.9 + skew, 10.0 * i + 3.0) for i in range(5)]
    trips.insert(2, (100.0, 100.001 + skew, 100.002))
    clock = links.clock(trips)
    assert clock.offset_s == pytest.approx(skew, abs=1e-9) and clock.error_s == pytest.approx(0.001)
    finding = links.check_clocks({1: clock, 2: links.Clock(0.0, 0.001)})
    assert finding.status is status and said in finding.found


def test_a_slow_network_is_no_clock_skew():
    assert links.check_clocks({1: links.clock([(0.0, 2.0, 3.0)])}).status is Status.OK


def test_a_slow_link_is_named():
    good = [Link(i, j, 0.2, 1000.0 + i) for i in range(3) for j in range(3) if i != j]
    assert links.check_links(good, [], 6).status is Status.OK
    slow = [replace(link, mb_per_s=50.0) if (link.source, link.target) == (2, 1) else link for link in good]
    finding = links.check_links(slow, [], 6)
    assert finding.status is Status.WARNING and "2 to 1: 50 MB/s" in finding.found and "0 to 1" not in finding.found
    far = [replace(link, latency_ms=9.0) if (link.source, link.target) == (0, 2) else link for link in good]
    assert links.slow_links(far) == [Link(0, 2, 9.0, 1000.0)]
    assert "4 of 6 links" in links.check_links(good[:4], [], 6).found
    assert links.check_links(good, ["worker 1 went away"], 6).status is Status.FAILED


def test_every_pair_is_measured_once_neighbours_first():
    order = list(links.pairs([0, 2, 5]))
    assert order[:3] == [(0, 2), (2, 5), (5, 0)]
    assert sorted(order) == [(i, j) for i in (0, 2, 5) for j in (0, 2, 5) if i != j]


def test_blocked_ways_are_named():
    addresses = ["a:1", "b:1", "c:1"]
    reached = {0: {1: "", 2: ""}, 1: {0: "", 2: "no answer within 3 s"}, 2: {0: "", 1: ""}}
    finding = links.check_ports(reached, addresses)
    assert finding.status is Status.FAILED and finding.found == "worker 1 to worker 2 (c:1): no answer within 3 s"
    del reached[2]  # it never came up, which another check says
    assert links.check_ports(reached, addresses).status is Status.OK


def test_facts_travel_as_json():
    assert Facts.from_json(_H100.to_json(), "worker 1") == _H100
    for wrong in ({}, {"host": 1}, {**_CPU.to_json(), "memory": 5}, {**_CPU.to_json(), "more": 1}):
        with pytest.raises(PeerError, match="worker 1 told facts that cannot be read"):
            Facts.from_json(wrong, "worker 1")
