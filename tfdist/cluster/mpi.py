"""Whether this process runs under MPI, and the beginning and the end of its use."""

import atexit
import functools
import importlib.util
import os
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.address import shorten
from tfdist.errors import UsageError

_LEAVE_S = 3.0

_PLACES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Rank and size, as MPICH and its relatives, and Open MPI, tell them."""


def processes(environ: "Mapping[str, str] | None" = None) -> int:
    """Returns how many processes MPI has started together with this one; 0 where it has not started this one."""
    try:
        found = place(os.environ if environ is None else environ)
    except UsageError:  # `MPIEnvironment` says so where it matters
        return 0
    return found[1] if found else 0


def is_told(environ: Mapping[str, str]) -> bool:
    """Whether MPI has set a variable that says which of its processes this is."""
    return any(environ.get(name, "").strip() for names in _PLACES for name in names)


def place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Reads which of MPI's processes this is, without starting MPI.

    Args:
        environ: The environment variables.

    Returns:
        Rank and size; None where MPI has not started this process.

    Raises:
        UsageError: If the variables cannot be right; the message names them.
    """
    trouble = None
    for names in _PLACES:
        texts = [environ.get(name, "").strip() for name in names]
        if not any(texts):
            continue
        if all(re.fullmatch(r"[0-9]{1,7}", text) for text in texts) and int(texts[0]) < int(texts[1]):
            return int(texts[0]), int(texts[1])
        trouble = trouble or UsageError(
            f"MPI: {names[0]}={shorten(texts[0])} and {names[1]}={shorten(texts[1])}: a rank from 0 and a larger "
            "number of processes are needed, as mpiexec sets them; start with mpiexec, unset both, or set TF_CONFIG"
        )
    if trouble:
        raise trouble
    return None


def is_installed() -> bool:
    """Whether mpi4py can be imported."""
    return importlib.util.find_spec("mpi4py") is not None


def require_mpi(environ: "Mapping[str, str] | None" = None) -> None:
    """Checks that MPI can be used by this process, without starting it.

    Raises:
        UsageError: mpi4py is missing, or this process was not started under MPI.
    """
    if not is_installed():
        raise UsageError("transport='mpi': mpi4py is not installed; pip install 'tfdist[mpi]'")
    if not processes(environ):
        raise UsageError(
            "transport='mpi': this process was not started under MPI; start the job with `tfdist launch --mpi "
            "--workers=N SCRIPT` or `mpiexec -n N python SCRIPT`, or use transport='auto' or 'collective'"
        )


@functools.cache
def mpi() -> Any:
    """Returns `mpi4py.MPI`, which begins MPI when it is first imported, and sees to its end.

    Raises:
        UsageError: this MPI cannot be used by several threads.
    """
    import mpi4py

    # mpi4py's own way out waits for all workers without end, also where one has failed.
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError(f"{library()} was built without support for threads (MPI_THREAD_MULTIPLE); use another MPI")
    atexit.register(leave)
    return MPI


def library() -> str:
    """Returns name and version of the MPI that mpi4py uses."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())


def leave() -> None:
    """Ends MPI, where this process uses it, if all of the job's processes come here within a moment.

    Those of a failed job do not, so nothing here waits without end. Called again, it does nothing.
    """
    if mpi.cache_info().currsize:
        _end()


@functools.cache
def _end() -> None:
    MPI = mpi()
    arrived = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + _LEAVE_S
    while not arrived.Test():
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)
    # It waits for processes that have given up just now; a thread of its own need not be waited for.
    ending = threading.Thread(target=MPI.Finalize, daemon=True)
    ending.start()
    ending.join(_LEAVE_S)
