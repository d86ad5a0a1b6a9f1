"""The log files of the workers; those of earlier runs are never written over."""

import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from tfdist.cluster.address import shorten
from tfdist.errors import UsageError

_MAX_RUNS = 10_000


def open_logs(log_dir: str | os.PathLike, workers: int, stack: ExitStack) -> list[BinaryIO]:
    """Creates one log file a worker.

    They are `worker-0.log`, `worker-1.log`, ...; if any of those exists, all are `worker-0.1.log`, ... with
    the first number that is free for all.

    Args:
        log_dir: The folder; made if it does not exist.
        workers: How many.
        stack: Closing it closes the files.

    Returns:
        The open files, unbuffered, worker 0's first.

    Raises:
        UsageError: If the folder or a file in it cannot be made.
    """
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for run in itertools.islice(itertools.count(), _MAX_RUNS):
            middle = f".{run}" if run else ""
            paths = [folder / f"worker-{index}{middle}.log" for index in range(workers)]
            if any(os.path.lexists(path) for path in paths):
                continue
            return [stack.enter_context(open(path, "xb", buffering=0)) for path in paths]
    except OSError as error:
        raise UsageError(
            f"log_dir={shorten(str(log_dir))}: cannot write logs there ({error.strerror or error}); give a "
            "folder that exists or can be made, and that you may write to"
        ) from None
    raise UsageError(
        f"log_dir={shorten(str(log_dir))} has logs of {_MAX_RUNS} runs; remove some, or give another folder"
    )
