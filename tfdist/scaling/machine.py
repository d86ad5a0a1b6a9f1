"""What this machine has for a sweep, without importing TensorFlow."""

import dataclasses
import os
import shutil
import subprocess

from tfdist.cores import available_cores
from tfdist.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of this machine.

    Attributes:
        gpus: how many there are.
        cores: that this process may use.
    """

    gpus: int
    cores: int

    def sharing(self, replicas: int) -> float:
        """Returns how many replicas share the busiest device; replicas on CPUs have a core each as long as it goes."""
        return 1.0 if self.gpus else float(-(-replicas // self.cores))

    def cores_each(self, replicas: int) -> int:
        """Returns how many cores each of `replicas` can have."""
        return max(1, self.cores // replicas)

    def require(self, replicas: int, *, oversubscribe: bool) -> None:
        """Checks that there are devices for `replicas`.

        Raises:
            UsageError: there are not.
        """
        if self.gpus and replicas > self.gpus:
            raise UsageError(
                f"--replicas: {replicas} replicas are more than the {self.gpus} GPU(s) of this machine; take fewer, "
                "or give a --launcher that reaches more machines"
            )
        if not self.gpus and replicas > self.cores and not oversubscribe:
            raise UsageError(
                f"--replicas: {replicas} replicas are more than the {self.cores} core(s) of this machine; take fewer, "
                "give a --launcher that reaches more machines, or --oversubscribe to let replicas share cores"
            )


def this_machine() -> Machine:
    """Returns what there is."""
    return Machine(_gpus(), available_cores())


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    found = sum(line.startswith("GPU ") for line in listed.splitlines())
    return found if visible is None else min(found, len(visible.split(",")))
