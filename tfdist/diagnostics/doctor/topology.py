"""How the GPUs of a machine are connected, as `nvidia-smi topo -m` shows it, and what collectives then run over."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.diagnostics.doctor.facts import Facts
from tfdist.diagnostics.doctor.report import Finding, joined, workers

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_KINDS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe between the host bridges of a NUMA node",
    "SYS": "PCIe and the link between CPU sockets",
}
_FAR = ("SYS",)


@dataclass(frozen=True)
class Topology:
    """The connections of the GPUs of one machine.

    Attributes:
        gpus: how many there are.
        links: the kind of connection of each pair (a, b) with a < b: "NV12" for 12 NVLinks, PIX, PXB, PHB, NODE, SYS.
    """

    gpus: int
    links: Mapping[tuple[int, int], str]

    @property
    def nvlink(self) -> bool:
        """Whether all pairs are connected by NVLink."""
        return bool(self.links) and all(kind.startswith("NV") for kind in self.links.values())


def parse_topology(text: str) -> "Topology | None":
    """Reads the output of `nvidia-smi topo -m`.

    Returns:
        The connections; None where the text is no such table.
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), None)
    if header is None:
        return None
    names = [name for name in header if _GPU.fullmatch(name)]
    rows = {line[0]: line[1 : 1 + len(names)] for line in lines if line and line[0] in names and line is not header}
    if list(rows) != names or any(len(row) != len(names) for row in rows.values()):
        return None
    links = {(a, b): rows[names[a]][b] for a in range(len(names)) for b in range(a + 1, len(names))}
    if any(kind not in _KINDS and not re.fullmatch(r"NV\d+", kind) for kind in links.values()):
        return None
    return Topology(len(names), links)


def check_collective(facts: Mapping[int, Facts]) -> Finding:
    """Says what gradients travel over: NCCL over NVLink, PCIe or the network, or TensorFlow's ring on CPUs.

    Only machines whose workers see several GPUs have a topology that matters.
    """
    counts = {index: len(found.gpus) for index, found in facts.items()}
    if not any(counts.values()):
        if len(facts) == 1:
            return Finding.ok("collective", "none between workers: one worker on CPUs")
        return Finding.ok("collective", f"TensorFlow's ring on CPUs, {_between(facts)}; --transport=mpi may be faster")
    if not all(counts.values()):
        without = [index for index, count in counts.items() if not count]
        return Finding.failed(
            "collective",
            f"{workers(without)} has no GPU and the others have",
            "Leave workers without GPUs out of the job, or set CUDA_VISIBLE_DEVICES=-1 on all of them.",
        )
    machines = {found.machine for found in facts.values()}
    within, trouble = [], []
    for machine in sorted(machines):
        here = {index: found for index, found in facts.items() if found.machine == machine}
        if sum(counts[index] for index in here) < 2:
            continue
        said, far = _within(next(iter(here.values())))
        within.append(f"{workers(here)}: {said}")
        trouble += far
    network = [f"NCCL over the network between {len(machines)} machines"] if len(machines) > 1 else []
    said = joined(within + network) or "none: one GPU"
    if trouble:
        return Finding.warning(
            "collective",
            f"{said}; {joined(trouble)}",
            "Choose GPUs of one socket with CUDA_VISIBLE_DEVICES where fewer are enough, or expect slower all-reduces.",
        )
    return Finding.ok("collective", said)


def _between(facts: Mapping[int, Facts]) -> str:
    count = len({found.machine for found in facts.values()})
    return "within one machine" if count == 1 else f"over the network between {count} machines"


def _within(facts: Facts) -> tuple[str, list[str]]:
    """Returns what the GPUs of a machine are connected by, and the pairs that are far apart."""
    topology = parse_topology(facts.topology)
    if topology is None:
        return "NCCL, over what nvidia-smi does not tell", []
    numbers = facts.gpu_numbers if len(facts.gpu_numbers) > 1 else tuple(range(topology.gpus))
    links = {pair: kind for pair, kind in topology.links.items() if set(pair) <= set(numbers)}
    if Topology(len(numbers), links).nvlink:
        return f"NCCL over NVLink ({', '.join(sorted(set(links.values())))})", []
    kinds = sorted({kind for kind in links.values() if kind in _KINDS}, key=list(_KINDS).index)
    some = "NVLink and " if any(kind.startswith("NV") for kind in links.values()) else ""
    far = [f"GPU {a} and GPU {b}: {_KINDS[kind]}" for (a, b), kind in links.items() if kind in _FAR]
    return f"NCCL over {some}PCIe ({', '.join(kinds)})", far[:1] + ([f"{len(far)} pairs like this"] * (len(far) > 1))
