"""What the subcommands of `tfdist` share: their options, the files they write, and the processes they start."""

import argparse
import json
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn

from tfdist.errors import UsageError
from tfdist.files import write_whole


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises the error."""
        raise UsageError(f"{message} ('{self.prog} --help' says more)")


def end(process: subprocess.Popen) -> None:
    """Ends the process if it still runs; the launcher takes its workers along."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def require_at_least(limits: "dict[str, tuple[float, float]]") -> None:
    """Checks options.

    Args:
        limits: for each option its value and the least one allowed.

    Raises:
        UsageError: naming the first that is below.
    """
    for name, (value, least) in limits.items():
        if value < least:
            raise UsageError(f"{name}={value}: a number of at least {least} is needed")


def require_folder(option: str, file: "str | None") -> None:
    """Raises UsageError where the folder that `file` is to lie in does not exist."""
    if file and not Path(file).absolute().parent.is_dir():
        raise UsageError(f"{option}={file}: there is no folder {Path(file).absolute().parent}")


def write_json(file: "str | Path", value: Any) -> None:
    """Writes `value` as JSON; the file appears whole or not at all."""
    write_whole(file, json.dumps(value, indent=1) + "\n")
