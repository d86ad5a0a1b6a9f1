"""What a pod of a job for Kubernetes gets: amounts of memory and cores, and folders that outlive it."""

import posixpath
import re
from collections.abc import Sequence

from tfdist.command import as_typed
from tfdist.errors import UsageError

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_MEMORY = re.compile(_NUMBER + r"(?:([KMGTPE]i|[kMGTPE])|[eE]([+-]?[0-9]{1,2}))?")
_CORES = re.compile(_NUMBER + "(m?)")
_LETTERS = "KMGTPE"
_LEAST_MEMORY = 1 << 20
_FOLDERS = {
    "checkpoint_dir": "or restarts begin at step 0",
    "log_dir": "or it is gone with its pod",
}
_FOLDER = re.compile(rf"--?({'|'.join(_FOLDERS)})(?:=(.*))?", re.DOTALL)


def check_amount(name: str, amount: str) -> None:
    """Checks an amount of memory or of cores.

    Args:
        name: "memory" or "cpu".
        amount: What the user wrote.

    Raises:
        UsageError: If Kubernetes has no such amount, or nothing runs in it.
    """
    option = as_typed("render_option", f"{name}={amount}")
    if name == "cpu":
        match = _CORES.fullmatch(amount)
        if match is None or float(match[1]) == 0:
            raise UsageError(f"{option}: a number of cores is needed, such as 8, 0.5 or 500m")
        return
    match = _MEMORY.fullmatch(amount)
    if match is None:
        raise UsageError(
            f"{option}: a number with a unit of Kubernetes is needed, such as 32Gi or 500M; the units are "
            "Ki, Mi, Gi, Ti, Pi, Ei (powers of 1024) and k, M, G, T, P, E (powers of 1000)"
        )
    size = float(match[1]) * _unit(match[2]) * 10.0 ** int(match[3] or 0)
    if size < _LEAST_MEMORY:
        raise UsageError(f"{option}: that is {size:.12g} bytes, too little for a worker; give a unit, such as 32Gi")


def _unit(name: "str | None") -> int:
    if not name:
        return 1
    return (1024 if name.endswith("i") else 1000) ** (1 + _LETTERS.index(name[0].upper()))


def kept_folders(command: Sequence[str]) -> dict[str, str]:
    """Returns the folders that a script's arguments name and that have to outlive a pod, by the name of the flag.

    Args:
        command: The script's path, then its arguments.
    """
    found = {}
    for place, word in enumerate(command[1:], 1):
        match = _FOLDER.fullmatch(word)
        if match is not None:
            value = match[2] if match[2] is not None else "".join(command[place + 1 : place + 2])
            found[match[1]] = value
    return {flag: folder for flag, folder in found.items() if folder and "://" not in folder}


def remarks(folders: "dict[str, str]") -> list[tuple[str, str, str]]:
    """Returns for each of the folders its flag, its path, and what to know about it."""
    return [
        (
            flag,
            folder,
            ("" if folder.startswith("/") else "(in the image's working directory) ")
            + f"has to be on such a disk, {_FOLDERS[flag]}",
        )
        for flag, folder in folders.items()
    ]


def mount_points(folders: "dict[str, str]") -> dict[str, str]:
    """Returns where a shared disk is to be mounted for these folders, by a name for each; a blank where none says."""
    places = {flag: posixpath.normpath(folder) for flag, folder in folders.items() if folder.startswith("/")}
    outer: dict[str, str] = {}
    for flag, place in sorted(places.items(), key=lambda item: len(item[1])):
        if not any(place == other or place.startswith(f"{other}/") for other in outer.values()):
            outer[flag] = place
    return outer or {"shared": "/PATH"}
