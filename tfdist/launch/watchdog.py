"""Kills the workers if their launcher is killed, so that even `kill -9` of it leaves no process behind.

A tiny process of its own waits on a pipe whose other end only the launcher has. When that end closes, however
the launcher died, it kills the process groups it was told of. Linux's PR_SET_PDEATHSIG is not used: it
reaches only the worker and not the worker's own children, it works on Linux alone, and it has to be set by
Python code between fork and exec, which may deadlock if the launching process has threads.
"""

import subprocess
import sys

# Reads one process group a line; 'done' means that all have ended. In a session of its own, so that Ctrl-C or
# a signal to the launcher's group does not end it before the launcher.
_PROGRAM = """
import os, signal, sys
groups = []
for line in sys.stdin:
    if line == "done\\n":
        sys.exit(0)
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Watchdog:
    """A process that outlives the launcher for as long as it takes to kill the workers."""

    def __init__(self) -> None:
        """Starts it."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
            cwd="/",
        )

    def guard(self, group: int) -> None:
        """Adds a process group to those to be killed.

        Args:
            group: Its id.
        """
        self._tell(f"{group}\n")

    def close(self) -> None:
        """Ends it; to be called when all groups have ended, and before their ids can be given to others."""
        self._tell("done\n")
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        try:
            self._process.stdin.write(line.encode())
        except OSError:
            pass  # somebody ended it: go on without
