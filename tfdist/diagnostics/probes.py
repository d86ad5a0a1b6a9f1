"""What this machine has: processor, memory, disks, GPUs. Nothing here imports TensorFlow or raises."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.cores import available_cores

_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files of a control group's limit and use of memory, and the line of its cache, in version 2 and version 1."""
_GPU = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[0-9a-fA-F-]+)\)", re.M)
_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Space:
    """Memory, or the space of a file system.

    Attributes:
        free: bytes that this process may still take.
        total: bytes in all.
    """

    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free"


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver lists it.

    Attributes:
        number: the driver's number.
        name: the model.
        uuid: which GPU it is, the same for every process and container.
    """

    number: int
    name: str
    uuid: str


def cpu_model() -> str:
    """Returns the processor's name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"


def cores() -> str:
    """Returns how many cores this process may use, out of how many."""
    return f"{available_cores()} of {os.cpu_count() or '?'} usable"


def memory() -> "Space | None":
    """Returns the memory that this process may use, within its container's limit; None where it is not known."""
    try:
        text = Path("/proc/meminfo").read_text()
        total, free = (int(re.search(rf"^{name}:\s*(\d+) kB", text, re.M)[1]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, TypeError, ValueError):
        return None
    space = Space(free * 1024, total * 1024)
    for group in _groups():
        space = within_group(space, group)
    return space


def _groups() -> list[Path]:
    """Returns the folders of this process's control groups that can limit its memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        root = {"": _CGROUPS, "memory": _CGROUPS / "memory"}.get(controllers)
        if root is not None:
            own = root / path.lstrip("/")
            groups += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return groups


def within_group(space: Space, group: Path) -> Space:
    """Returns what a control group leaves of the memory `space`; the cache of files that it holds counts as free.

    Args:
        space: the machine's memory, or what groups further down leave of it.
        group: the group's folder.
    """
    for limit, used, cache in _LIMITS:
        try:
            most = int((group / limit).read_text())
            taken = int((group / used).read_text())
            found = re.search(rf"^{cache} (\d+)$", (group / "memory.stat").read_text(), re.M)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if most < space.total:
            left = max(0, most - taken + (int(found[1]) if found else 0))
            space = Space(min(space.free, left), most)
    return space


def disk(path: "str | os.PathLike[str]") -> "Space | None":
    """Returns the space of the file system on which `path` is, or would be; None where there is none, as in /proc."""
    place = Path(path).absolute()
    for folder in (place, *place.parents):
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue  # not made yet
        return Space(usage.free, usage.total) if usage.total else None
    return None


def nvidia_smi(*arguments: str) -> "str | None":
    """Returns what `nvidia-smi` prints; None where there is none, or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        asked = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return asked.stdout


def listed_gpus(text: "str | None") -> tuple[Gpu, ...]:
    """Returns the GPUs in the output of `nvidia-smi -L`."""
    return tuple(Gpu(int(number), name, uuid) for number, name, uuid in _GPU.findall(text or ""))


def visible_gpus(gpus: Sequence[Gpu], variable: "str | None") -> tuple[Gpu, ...]:
    """Returns those GPUs that CUDA shows a process.

    Args:
        gpus: all of the machine, by number.
        variable: CUDA_VISIBLE_DEVICES; None where it is not set.

    Returns:
        The GPUs in the variable's order; as CUDA does, those before the first entry that is no GPU.
    """
    if variable is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        number = int(entry) if entry.isdecimal() else None
        match = [gpu for gpu in gpus if gpu.number == number or (len(entry) > 4 and gpu.uuid.startswith(entry))]
        if len(match) != 1:
            break
        chosen += match
    return tuple(chosen)


def used_memory(text: "str | None", numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the used megabytes of the GPUs `numbers`.

    Args:
        text: what `nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits` prints.
        numbers: the driver's numbers of GPUs; those that the text lacks are left out.
    """
    used = {int(number): int(size) for number, size in re.findall(r"^(\d+), *(\d+)\s*$", text or "", re.M)}
    return tuple(used[number] for number in numbers if number in used)


def machine_id() -> str:
    """Returns a text that is the same for all processes of this machine, and for its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
