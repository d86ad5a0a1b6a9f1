"""Whether every worker has the same data: names, sizes, and a hash of the ends of each file."""

import glob
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.command import as_typed
from tfdist.config import did_you_mean
from tfdist.diagnostics.doctor.report import Finding, joined, sides, workers
from tfdist.errors import PeerError, UsageError

_END_BYTES = 1 << 20
_MOST_HASHED = 256
"""So many files are read, spread over all: names and sizes of the others have to do."""
_SHOWN = 4
_PREFIXES = ("bytes", "tfrecord", "synthetic")
_THERE_ARE = "there are bytes:, tfrecord: and synthetic:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Contents:
    """What a worker has of the data.

    Attributes:
        kind: what the spec names: "files", "digits", "synthetic" or "function".
        files: (name, size, hash) of each file; the hash is empty where the file was not read.
        error: why the data cannot be used; empty where it can.
    """

    kind: str
    files: tuple[tuple[str, int, str], ...] = ()
    error: str = ""

    @classmethod
    def from_json(cls, data: Any, peer: str) -> "Contents":
        """Reads what another worker sent.

        Raises:
            PeerError: it is something else.
        """
        try:
            files = tuple((str(name), int(size), str(digest)) for name, size, digest in data["files"])
            return cls(str(data["kind"]), files, str(data["error"]))
        except (TypeError, KeyError, ValueError):
            raise PeerError(f"{peer} told of data what cannot be read; is its tfdist another version?") from None


def check_spec(spec: str) -> None:
    """Checks the form of --data, without looking at a file.

    Raises:
        UsageError: it has none of the forms that are known.
    """
    name, colon, rest = spec.partition(":")
    forms = "give digits, bytes:PATH, tfrecord:GLOB, synthetic:..., package.module:function, a path or a glob"
    typed = as_typed("data", spec)
    if "://" in spec:
        raise UsageError(f"{typed}: only files that the machines have mounted can be compared; {forms}")
    if not spec or (name == "digits" and colon) or (name in ("bytes", "tfrecord") and not rest):
        raise UsageError(f"{typed}: {forms}")
    if colon and not rest and name not in _PREFIXES:
        raise UsageError(
            f"{typed} begins with no prefix of data ({_THERE_ARE}); {forms}{did_you_mean(name, _PREFIXES)}"
        )


def _no_prefix(name: str) -> str:
    return f"{name}: is no prefix of data ({_THERE_ARE})"


def contents(spec: str) -> Contents:
    """Looks at the data that `spec` names.

    Args:
        spec: as --data of scripts/train.py, or a path or glob.

    Returns:
        What is there. A function of the user's is looked for but not called.
    """
    name, colon, rest = spec.partition(":")
    if spec == "digits":
        return _digits()
    if name == "synthetic" and (colon or not os.path.exists(spec)):
        return Contents("synthetic", ((spec, 0, ""),))
    if name == "bytes" and colon:
        path = rest.rpartition(",seq_len=")[0] if ",seq_len=" in rest else rest
        return _files(spec, path, [path])
    if name == "tfrecord" and colon:
        return _files(spec, rest, [match for match in glob.glob(rest, recursive=True) if os.path.isfile(match)])
    if _FUNCTION.fullmatch(spec) and not os.path.exists(spec):
        return _function(name)
    return _files(spec, spec, [spec] if os.path.exists(spec) else glob.glob(spec, recursive=True))


def check_data(specs: Mapping[int, str], found: Mapping[int, Contents]) -> Finding:
    """Judges whether all workers have the same data.

    Args:
        specs: what each worker was told; empty where it was told nothing.
        found: what each worker has.
    """
    check = "data"
    if not any(specs.values()):
        return Finding.skipped(check, "no --data was given")
    without = [index for index, spec in specs.items() if not spec]
    if without:
        return Finding.failed(check, f"{workers(without)} was given no --data", "Give every worker the same arguments.")
    errors = {index: there.error for index, there in found.items() if there.error}
    if errors:
        return Finding.failed(check, sides(errors), "Put the data where every worker can read it, and check the path.")
    first = min(found)
    for index in sorted(found):
        if found[index] != found[first]:
            said = _difference(first, found[first], index, found[index])
            return Finding.failed(check, said, "Copy the data anew to these workers, or let all read a shared disk.")
    return Finding.ok(check, _describe(found[first]) + (", the same on all workers" if len(found) > 1 else ""))


def _difference(first: int, ours: Contents, index: int, theirs: Contents) -> str:
    if ours.kind != theirs.kind:
        return sides({first: ours.kind, index: theirs.kind})
    a = {name: (size, digest) for name, size, digest in ours.files}
    b = {name: (size, digest) for name, size, digest in theirs.files}
    lacking = {index: [name for name in a if name not in b], first: [name for name in b if name not in a]}
    said = [f"worker {who} lacks {_some(names)}" for who, names in lacking.items() if names]
    sizes = [name for name in a if name in b and a[name][0] != b[name][0]]
    if sizes:
        name = sizes[0]
        more = f", and {len(sizes) - 1} more sizes differ" if len(sizes) > 1 else ""
        said.append(f"{name} has {a[name][0]} bytes on worker {first} and {b[name][0]} on worker {index}{more}")
    changed = [name for name in a if name in b and name not in sizes and a[name] != b[name]]
    if changed:
        said.append(f"the content is not the same on workers {first} and {index} of {_some(changed)}")
    return joined(said or ["the order of the files differs"])


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _describe(there: Contents) -> str:
    if there.kind == "synthetic":
        return f"{there.files[0][0]}: each worker makes it"
    if there.kind == "function":
        return "the function's module is there; it was not called"
    if there.kind == "digits":
        return "digits of scikit-learn"
    size = sum(size for _, size, _ in there.files)
    read = sum(bool(digest) for _, _, digest in there.files)
    part = "" if read == len(there.files) else f" (content of {read} of them read)"
    return f"{len(there.files)} file(s), {size} bytes{part}"


def _files(spec: str, root: str, matches: list[str]) -> Contents:
    """Returns what lies at `matches`: files, and all files within folders.

    Names are relative to `root` where that is a folder, else to the folder in which its wildcards begin, so that
    workers may have the same files in different places.
    """
    base = root if os.path.isdir(root) else _fixed_part(root)
    paths = [path for match in matches for path in ([Path(match)] if os.path.isfile(match) else Path(match).rglob("*"))]
    found = sorted({os.path.relpath(path, base): path for path in paths if path.is_file()}.items())
    if not found:
        what = "is an empty folder" if os.path.isdir(root) else "names no file here"
        name, colon, _ = spec.partition(":")
        if colon and re.fullmatch(r"\w+", name) and name not in _PREFIXES:
            what += f", and {_no_prefix(name)}"
        return Contents("files", error=f"--data={spec} {what}")
    stride = -(-len(found) // _MOST_HASHED)
    try:
        files = [(n, p.stat().st_size, _hash(p) if i % stride == 0 else "") for i, (n, p) in enumerate(found)]
    except OSError as error:
        return Contents("files", error=f"{error.filename} cannot be read: {error.strerror}")
    return Contents("files", tuple(files))


def _fixed_part(pattern: str) -> str:
    """Returns the folder above the first wildcard of a glob, or above a file."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return str(Path(*parts[:fixed])) if fixed else "."


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_END_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def _digits() -> Contents:
    spec = importlib.util.find_spec("sklearn")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz" if spec and spec.origin else None
    if file is None or not file.is_file():
        return Contents("digits", error="scikit-learn, which ships the digits, is not installed whole")
    return Contents("digits", ((file.name, file.stat().st_size, _hash(file)),))


def _function(module: str) -> Contents:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # to find a module, Python runs the packages that it is in
        spec = None
    if spec is None:
        why = f"the module {module} is not found here, installed or in {os.getcwd()}"
        return Contents("function", error=why if "." in module else f"{why}, and {_no_prefix(module)}")
    if not spec.origin or not os.path.isfile(spec.origin):
        return Contents("function", ((module, 0, ""),))
    file = Path(spec.origin)
    return Contents("function", ((module, file.stat().st_size, _hash(file)),))
