"""What the subcommands of `tfdist` share: their options, the files they write, and the processes they start."""

import argparse
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn

from tfdist.cluster.address import cut, shorten
from tfdist.errors import UsageError
from tfdist.files import write_whole

_LONGEST = 200


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises the error."""
        raise UsageError(f"{message} ('{self.prog} --help' says more)")


def as_typed(option: str, value: Any) -> str:
    """Returns an option as the user has typed it, such as `--mpi`, `--pin=1` or `--env=A=1 --env=B`.

    Args:
        option: Its name, without dashes.
        value: What it was read as: True, text, a number, or a list of what it was given.
    """
    if value is True:
        return f"--{option}"
    if isinstance(value, list):
        return " ".join(as_typed(option, one) for one in value)
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    plain = re.fullmatch(r"[\w.,:/=@%+~-]*", text, re.ASCII)
    return f"--{option}={cut(text, _LONGEST) if plain else shorten(text, _LONGEST)}"


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
