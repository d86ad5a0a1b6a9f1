"""What one worker of `tfdist doctor` knows of itself, and tells worker 0."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from tfdist.cluster.address import shorten
from tfdist.cluster.gpus import SeenGPUs
from tfdist.cluster.messages import installed_versions
from tfdist.cores import available_cores
from tfdist.diagnostics.probes import (
    Space,
    cpu_model,
    disk,
    listed_gpus,
    machine_id,
    memory,
    nvidia_smi,
    used_memory,
    visible_gpus,
)
from tfdist.errors import PeerError

PACKAGES = ("tensorflow", "keras", "tfdist", "numpy", "mpi4py")


@dataclass(frozen=True)
class Facts:
    """One worker.

    Attributes:
        host: the machine's name.
        machine: the same text for all workers of a machine.
        python: its version.
        versions: of the packages that have to fit together.
        unmet: what tfdist asks for and is not there, in words.
        tensorflow_error: why TensorFlow cannot be imported; empty where it can.
        gpus: the models of the GPUs that TensorFlow sees.
        gpu_uuids: of the GPUs that the driver lists and CUDA_VISIBLE_DEVICES leaves.
        gpu_numbers: the driver's numbers of these.
        gpu_pool: a name for the GPUs that TensorFlow sees (see `SeenGPUs`).
        topology: what `nvidia-smi topo -m` prints; empty where it does not.
        cpu: the processor's name.
        cores: that the worker may use.
        gpu_used_mb: memory of these GPUs that is taken already, by other programs.
        memory: of the machine or container; None where it is not known.
        shared_memory: /dev/shm; None where there is none.
        disk: where checkpoints go, or the working directory.
        disk_path: which of them.
    """

    host: str
    machine: str
    python: str
    versions: Mapping[str, str]
    unmet: tuple[str, ...] = ()
    tensorflow_error: str = ""
    gpus: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    gpu_numbers: tuple[int, ...] = ()
    gpu_pool: "str | None" = None
    topology: str = ""
    cpu: str = ""
    cores: int = 1
    gpu_used_mb: tuple[int, ...] = ()
    memory: "Space | None" = None
    shared_memory: "Space | None" = None
    disk: "Space | None" = None
    disk_path: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, peer: str) -> "Facts":
        """Reads what another worker's `to_json` returned.

        Raises:
            PeerError: it is something else; the message names `peer`.
        """
        try:
            lists = {name: tuple(data[name]) for name in ("unmet", "gpus", "gpu_uuids", "gpu_numbers", "gpu_used_mb")}
            names = ("memory", "shared_memory", "disk")
            spaces = {name: Space(**data[name]) if data[name] else None for name in names}
            return cls(**{**data, **lists, **spaces})
        except (TypeError, KeyError):
            raise PeerError(f"{peer} told facts that cannot be read; is its tfdist another version?") from None


def gather(disk_path: str) -> Facts:
    """Returns the facts of this process. Imports TensorFlow, and takes no memory of GPUs.

    Args:
        disk_path: where checkpoints go.
    """
    versions = installed_versions(PACKAGES)
    used = nvidia_smi("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")  # before TensorFlow takes some
    gpus, error = _tensorflow_gpus()
    visible = visible_gpus(listed_gpus(nvidia_smi("-L")), os.environ.get("CUDA_VISIBLE_DEVICES"))
    asked = requirements()
    return Facts(
        host=platform.node(),
        machine=machine_id(),
        python=platform.python_version(),
        versions=versions,
        unmet=unmet(asked, installed_versions([_name(line) for line in asked])),
        tensorflow_error=error,
        gpus=gpus,
        gpu_uuids=tuple(gpu.uuid for gpu in visible),
        gpu_numbers=tuple(gpu.number for gpu in visible),
        gpu_pool=SeenGPUs.detect(len(gpus), os.environ).pool,
        topology=nvidia_smi("topo", "-m") or "",
        cpu=cpu_model(),
        cores=available_cores(),
        gpu_used_mb=used_memory(used, [gpu.number for gpu in visible]),
        memory=memory(),
        shared_memory=disk("/dev/shm") if os.path.isdir("/dev/shm") else None,
        disk=disk(disk_path),
        disk_path=disk_path,
    )


def requirements() -> tuple[str, ...]:
    """Returns what the installed tfdist asks for, its extras left out."""
    try:
        return tuple(line for line in requires("tfdist") or () if "extra ==" not in line)
    except PackageNotFoundError:
        return ()


def unmet(asked: Sequence[str], versions: Mapping[str, str]) -> tuple[str, ...]:
    """Compares installed versions with what is asked for.

    Args:
        asked: requirements, such as "tensorflow>=2.21,<2.22".
        versions: the installed ones.

    Returns:
        For each requirement that is not met what is there and what is asked for.
    """
    wrong = []
    for line in asked:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = versions.get(requirement.name, "not installed")
        if version == "not installed":
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, and tfdist asks for {requirement}")
    return tuple(wrong)


def _name(line: str) -> str:
    return re.match(r"[\w.-]*", line)[0]


def _tensorflow_gpus() -> tuple[tuple[str, ...], str]:
    """Returns the models of the GPUs that TensorFlow sees, and why it cannot be imported."""
    try:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    except Exception as error:  # whatever it is, it is what the doctor is asked for
        return (), f"{type(error).__name__}: {shorten(str(error), 300)}"
    return tuple(str(gpu.get("device_name", "GPU")) for gpu in details), ""
