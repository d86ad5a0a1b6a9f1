"""Where a figure comes from: versions, devices, host, command, commit."""

import platform
import shlex
import subprocess
import sys
import time
from typing import Any

from tfdist.cluster.messages import installed_versions
from tfdist.cores import available_cores

_PACKAGES = ("tfdist", "tensorflow", "keras", "numpy", "mpi4py")


def provenance() -> dict[str, Any]:
    """Returns what has to be known of this process to run it again."""
    import tensorflow as tf

    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
        "host": platform.node(),
        "system": platform.platform(),
        "cores": available_cores(),
        "devices": [gpu.get("device_name", "GPU") for gpu in gpus] or ["CPU"],
        "command": shlex.join(sys.argv),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Returns the commit of the folder that the training was started in, if it has one."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
