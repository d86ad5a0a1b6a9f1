"""The checks of what the workers told of themselves: pure functions of their facts, by worker."""

from collections.abc import Mapping, Sequence

from tfdist.cluster.gpus import SeenGPUs, find_shortage, own_gpus, sharing
from tfdist.diagnostics.doctor.facts import Facts
from tfdist.diagnostics.doctor.report import Finding, joined, sides, workers
from tfdist.diagnostics.probes import Space

SAME = ("tensorflow", "keras", "tfdist", "numpy")
"""Packages that have to be equal on all workers."""
MEMORY_WARNING, MEMORY_FAILURE = 2 << 30, 256 << 20
DISK_WARNING, DISK_FAILURE = 5 << 30, 100 << 20
GPU_WARNING_MB = 1000
"""A driver and its display take less; a training takes more."""
SHARED_WARNING = 1 << 30
"""NCCL takes some ten to hundred megabytes a GPU; containers start with 64 MB."""


def all_checks(facts: Mapping[int, Facts], hosts: Sequence[Sequence[int]]) -> list[Finding]:
    """Returns every check of this module.

    Args:
        facts: what each worker told.
        hosts: the workers of each host, also those that told nothing.
    """
    return [
        check_versions(facts),
        check_tensorflow(facts),
        check_devices(facts, hosts),
        check_gpu_memory(facts),
        check_memory(facts),
        check_shared_memory(facts),
        check_disk(facts),
    ]


def check_versions(facts: Mapping[int, Facts]) -> Finding:
    """Checks that the workers' versions are equal, and what tfdist asks for."""
    lacking = {index: ", ".join(found.unmet) for index, found in facts.items() if found.unmet}
    if lacking:
        fix = "Install tfdist anew on these workers: pip install --upgrade tfdist."
        return Finding.failed("versions", sides(lacking), fix)
    differing = [name for name in SAME if len(_versions(facts, name)) > 1]
    if differing:
        said = joined(f"{name} differs ({sides(_by_worker(facts, name))})" for name in differing)
        return Finding.failed("versions", said, f"Install the same {' and '.join(differing)} on every worker.")
    pythons = {index: ".".join(found.python.split(".")[:2]) for index, found in facts.items()}
    loose = {"Python": pythons, "mpi4py": _by_worker(facts, "mpi4py")}
    uneven = {name: values for name, values in loose.items() if len(set(values.values())) > 1}
    if uneven:
        said = joined(f"{name} differs ({sides(values)})" for name, values in uneven.items())
        return Finding.warning("versions", said, f"Use the same {' and '.join(uneven)} on every worker.")
    one = next(iter(facts.values()))
    return Finding.ok("versions", ", ".join(f"{name} {one.versions.get(name, 'unknown')}" for name in SAME))


def check_tensorflow(facts: Mapping[int, Facts]) -> Finding:
    """Checks that TensorFlow can be imported, and sees the GPUs that the driver lists."""
    broken = {index: found.tensorflow_error for index, found in facts.items() if found.tensorflow_error}
    if broken:
        fix = "Run python -c 'import tensorflow' on these workers, and repair what it complains of."
        return Finding.failed("tensorflow", sides(broken), fix)
    blind = {
        index: f"the driver lists {len(found.gpu_uuids)} GPU(s), TensorFlow sees {len(found.gpus)}"
        for index, found in facts.items()
        if len(found.gpus) < len(found.gpu_uuids)
    }
    if blind:
        fix = "Install TensorFlow's CUDA libraries with pip install 'tfdist[gpu]', or set CUDA_VISIBLE_DEVICES=-1."
        return Finding.failed("tensorflow", sides(blind), fix)
    seen = any(found.gpus for found in facts.values())
    return Finding.ok("tensorflow", "can be imported, and sees every GPU" if seen else "can be imported; no GPUs here")


def check_devices(facts: Mapping[int, Facts], hosts: Sequence[Sequence[int]]) -> Finding:
    """Checks that all workers get the same devices, once those of a host have divided the GPUs that they see."""
    there = [tuple(index for index in host if index in facts) for host in hosts]
    there = [host for host in there if host]
    seen = {index: SeenGPUs(len(found.gpus), found.gpu_pool) for index, found in facts.items()}
    shortage = find_shortage(there, seen)
    if shortage is not None:
        return Finding.failed("devices", shortage[0], f"{shortage[1]}.")
    dividing = sharing(there, seen)
    own = {index: range(len(found.gpus)) for index, found in facts.items()}
    for host in there:
        if host[0] in dividing:
            own |= {index: own_gpus(seen[index].count, rank, len(host)) for rank, index in enumerate(host)}
    twice = _used_twice(facts, own)
    if twice:
        said = joined(f"{workers(indexes)} use the same GPU" for indexes in twice)
        fix = (
            "Give each worker of a machine GPUs of its own in CUDA_VISIBLE_DEVICES; or the same ones to all of them, "
            "and the machine the same name in all their addresses, for them to divide the GPUs."
        )
        return Finding.failed("devices", said, fix)
    devices = {index: _devices(found, own[index]) for index, found in facts.items()}
    if len(set(map(len, own.values()))) > 1:
        fix = "Give every worker the same number of GPUs: a job's workers have equally many replicas."
        return Finding.failed("devices", sides(devices), fix)
    if len(set(devices.values())) > 1:
        return Finding.warning("devices", sides(devices), "Use equal machines: the slowest sets the pace.")
    divide = f"; {workers(dividing)} divide the GPUs of their host" if dividing else ""
    return Finding.ok("devices", f"{next(iter(devices.values()))}{' on each worker' if len(facts) > 1 else ''}{divide}")


def check_gpu_memory(facts: Mapping[int, Facts]) -> Finding:
    """Checks that no other program holds memory of the GPUs."""
    used = {index: max(found.gpu_used_mb) for index, found in facts.items() if found.gpu_used_mb}
    if not used:
        return Finding.skipped("GPU memory", "no GPU tells of its memory")
    if max(used.values()) <= GPU_WARNING_MB:
        return Finding.ok("GPU memory", f"at most {max(used.values())} MB of a GPU are taken")
    taken = {index: f"{size} MB of a GPU are taken" for index, size in used.items() if size > GPU_WARNING_MB}
    return Finding.warning("GPU memory", sides(taken), "End the programs that nvidia-smi lists on these GPUs.")


def check_memory(facts: Mapping[int, Facts]) -> Finding:
    """Checks that there is memory left."""
    fix = "End other programs on these machines, or ask the scheduler for more memory."
    spaces = {index: found.memory for index, found in facts.items()}
    return _space("memory", spaces, MEMORY_WARNING, MEMORY_FAILURE, fix)


def check_shared_memory(facts: Mapping[int, Facts]) -> Finding:
    """Checks that /dev/shm, over which NCCL and MPI pass data within a machine, is large enough."""
    spaces = {index: found.shared_memory for index, found in facts.items() if found.shared_memory}
    if not spaces:
        return Finding.skipped("shared memory", "there is no /dev/shm")
    fix = "Give the container more: --shm-size=8g for docker, an emptyDir of medium Memory at /dev/shm for Kubernetes."
    return _space("shared memory", spaces, SHARED_WARNING, 0, fix)


def check_disk(facts: Mapping[int, Facts]) -> Finding:
    """Checks that the disk for checkpoints has space left."""
    fix = "Delete old checkpoints, or give a --checkpoint_dir on a larger disk."
    spaces = {index: found.disk for index, found in facts.items()}
    if not any(spaces.values()):
        where = sorted({found.disk_path for found in facts.values()})
        return Finding.skipped("disk", f"there is no disk at {', '.join(where)} that tells of its space")
    return _space("disk", spaces, DISK_WARNING, DISK_FAILURE, fix)


def _space(check: str, spaces: "Mapping[int, Space | None]", warning: int, failure: int, fix: str) -> Finding:
    known = {index: space for index, space in spaces.items() if space is not None}
    if not known:
        return Finding.skipped(check, "this system does not tell")
    least = min(known, key=lambda index: known[index].free)
    said = str(known[least]) if len(known) == 1 else f"{known[least]} on worker {least}, the least"
    if known[least].free < failure:
        return Finding.failed(check, said, fix)
    if known[least].free < warning:
        return Finding.warning(check, said, fix)
    return Finding.ok(check, said)


def _used_twice(facts: Mapping[int, Facts], own: Mapping[int, range]) -> list[tuple[int, ...]]:
    """Returns the workers, in groups, that would use a GPU together."""
    owners: dict[str, list[int]] = {}
    for index in sorted(facts):
        for uuid in facts[index].gpu_uuids[own[index].start : own[index].stop]:
            owners.setdefault(uuid, []).append(index)
    return sorted({tuple(indexes) for indexes in owners.values() if len(indexes) > 1})


def _devices(facts: Facts, own: range) -> str:
    if not own:
        return f"{facts.cores} core(s) of {facts.cpu or 'a CPU'}"
    gpus = facts.gpus[own.start : own.stop]
    return ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus)))


def _by_worker(facts: Mapping[int, Facts], package: str) -> dict[int, str]:
    return {index: found.versions.get(package, "unknown") for index, found in facts.items()}


def _versions(facts: Mapping[int, Facts], package: str) -> set[str]:
    return set(_by_worker(facts, package).values())
