"""`tfdist env`: what a bug report has to say of versions, devices and the job, as Markdown."""

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.cluster.address import cut, shorten
from tfdist.cluster.base import Cluster
from tfdist.cluster.messages import installed_versions
from tfdist.cluster.mpi import is_installed, place, processes
from tfdist.cluster.mpi_environment import MPIEnvironment
from tfdist.cluster.variables import begins_with, without_secrets
from tfdist.command import OptionParser, require_folder, write_json
from tfdist.diagnostics.probes import cores, cpu_model, disk, memory, nvidia_smi
from tfdist.errors import EXIT_DONE, UsageError

_NAMES = ("TF_CONFIG", "JOB_COMPLETION_INDEX", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("SLURM_", "OMPI_COMM_WORLD_", "PMI_", "TFDIST_", "NCCL_", "TF_")
_LONGEST = 1000
_MPI_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(' '.join(MPI.Get_library_version().split('\\n')[0].strip('\\0 ').split()))"
)
_MPI_TIMEOUT_S = 20.0


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist env` with its arguments; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:
        return EXIT_DONE
    require_folder("--json", options.json)
    environ = dict(os.environ)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    found = describe(environ)
    print(markdown(found))
    if options.json:
        write_json(options.json, found)
    return EXIT_DONE


def describe(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns what is known of this process, its machine and its job.

    Args:
        environ: the environment variables.

    Returns:
        Names and texts, in order, and under "variables" those that describe the job, never others. What cannot be
        found out has a text that says why.
    """
    packages = installed_versions(("tfdist", "tensorflow", "keras", "numpy", "mpi4py"))
    lines: dict[str, Callable[[], str]] = {
        "tfdist": lambda: packages["tfdist"],
        "TensorFlow": lambda: packages["tensorflow"],
        "Keras": lambda: packages["keras"],
        "NumPy": lambda: packages["numpy"],
        "Python": lambda: f"{platform.python_version()} ({sys.executable})",
        "CUDA, cuDNN of the build": _build,
        "mpi4py": lambda: packages["mpi4py"],
        "MPI": _mpi_library,
        "platform": platform.platform,
        "CPU": lambda: f"{cpu_model()}, {cores()}",
        "memory": lambda: str(memory() or "not known"),
        "shared memory": lambda: str(disk("/dev/shm") if os.path.isdir("/dev/shm") else "no /dev/shm"),
        "GPUs that TensorFlow sees": _tensorflow_gpus,
        "GPUs that the driver lists": lambda: _smi("-L"),
        "driver": lambda: _smi("--query-gpu=driver_version", "--format=csv,noheader"),
        "cluster": lambda: _cluster(environ),
    }
    return {**{name: _safely(line) for name, line in lines.items()}, "variables": job_variables(environ)}


def job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that tell a process of its job and its devices, by name.

    All others are left out. Those whose names speak of secrets, such as SLURM_JWT, are named without their value, and
    a user's name and password in an address are cut out, as is the token of the monitor.
    """
    return {
        name: cut(without_secrets(name, environ[name]), _LONGEST)
        for name in sorted(environ)
        if name in _NAMES or begins_with(name, _PREFIXES)
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Returns `describe`'s answer as a table."""
    lines = ["| what | found |", "|---|---|"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in found.items() if name != "variables"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in found["variables"].items()]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return "<br>".join(text.replace("\\", "\\\\").replace("|", "\\|").splitlines()) or "(empty)"


def _safely(line: Callable[[], str]) -> str:
    """Returns the line's text, or what went wrong: a broken part is what a bug report is about."""
    try:
        return line()
    except Exception as error:
        return f"error: {type(error).__name__}: {shorten(str(error), 500)}"


def _build() -> str:
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        return "built without CUDA"
    return f"{build.get('cuda_version', 'not known')}, {build.get('cudnn_version', 'not known')}"


def _tensorflow_gpus() -> str:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return "\n".join(f"{i}: {gpu.get('device_name', 'GPU')}" for i, gpu in enumerate(details)) or "none"


def _smi(*arguments: str) -> str:
    text = nvidia_smi(*arguments)
    # The UUID tells which very GPU it is, which is nobody's business.
    return re.sub(r" \(UUID: [^)]*\)", "", text).strip() if text else "no nvidia-smi that answers"


def _mpi_library() -> str:
    """Returns the library that mpi4py uses; another process asks it, as a broken MPI can end the one that does."""
    if not is_installed():
        return "not installed"
    asked = subprocess.run(
        [sys.executable, "-c", _MPI_LIBRARY], capture_output=True, text=True, timeout=_MPI_TIMEOUT_S, check=False
    )
    last = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
    return asked.stdout.strip() if asked.returncode == 0 else f"error: {shorten(last, 500)}"


def _cluster(environ: Mapping[str, str]) -> str:
    from tfdist.cluster.environments import ENVIRONMENTS

    present = next(environment for environment in ENVIRONMENTS if environment.is_present(environ))
    try:
        if isinstance(present, MPIEnvironment):  # reading more of it would begin MPI
            place(environ)
            return f"MPI: {processes(environ)} processes"
        cluster = Cluster.detect(environ)
    except UsageError as error:
        return f"error: {error}"
    if cluster.is_local:
        return "none: one worker on this machine"
    workers = cut(", ".join(cluster.workers), _LONGEST)
    return f"{cluster.source}: worker {cluster.index} of {cluster.num_workers} ({workers})"


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="tfdist env",
        description="Prints versions, devices and what this process knows of its job, as Markdown for a bug report.",
        epilog="Of the environment it prints TF_CONFIG, JOB_COMPLETION_INDEX, CUDA_VISIBLE_DEVICES and what begins\n"
        "with SLURM_, OMPI_COMM_WORLD_, PMI_, TFDIST_, NCCL_ or TF_; no value where the name speaks of a secret.\n\n"
        "exit code: 0; 2 for wrong use.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", help="write it to this file as well")
    return parser
