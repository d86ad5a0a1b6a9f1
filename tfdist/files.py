"""Files that appear whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: "str | os.PathLike[str]", text: str) -> None:
    """Writes a text file aside and renames it: a reader, or a crash, finds the old one or the new one.

    Args:
        path: the file; its folder exists.
        text: what it says.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are for their owner only
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
