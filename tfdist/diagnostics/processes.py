"""What the diagnostic commands share: their options, and processes that they start."""

import argparse
import signal
import subprocess
from typing import NoReturn

from tfdist.errors import UsageError


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
