"""Helpers for the tests of the launcher: scripts, a launcher in a process of its own, waiting, liveness."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
folder = Path(__file__).parent
def wait_for(name):
    deadline = time.monotonic() + 20
    while not (folder / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
def write(name, text=""):
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a worker script that knows `index`, `folder`, `wait_for(file)` and `write(file, text)`."""

    def make(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(_PREAMBLE + body)
        return str(path)

    return make


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Says whether a process runs; one that has ended but was not reaped does not."""

    def check(pid: int) -> bool:
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except ProcessLookupError:
            return False
        except FileNotFoundError:
            return not Path("/proc/self").exists()  # no /proc here: the signal says it all

    return check


@pytest.fixture
def remaining(tmp_path: Path) -> Callable[[], list[int]]:
    """Lists every process of this test that still runs, by a variable of its environment."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("only Linux shows the environment of processes")
    mark = f"TFDIST_TEST={tmp_path}".encode()

    def look() -> list[int]:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
            except OSError:
                continue  # it has just ended, or is somebody else's
        return found

    return look


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts `tfdist launch ARGS` in a process and session of its own; ends what is left of it at the end."""
    started: list[subprocess.Popen] = []

    def run(*args: str, **options: object) -> subprocess.Popen:
        env = {**os.environ, "TFDIST_TEST": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.cli", "launch", *args],
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "env": env,
                "start_new_session": True,
                # As a terminal starts it: this suite itself may run under nohup, which children inherit.
                "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
                **options,
            },
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
