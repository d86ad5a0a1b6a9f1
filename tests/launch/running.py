"""A job of `scripts/train.py` under `tfdist launch`, whose workers a test signals at chosen moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class RunningJob:
    """A job that runs.

    Args:
        folder: gets log, checkpoints, events and summary.
        flags: of `scripts/train.py`, or a script of the test's own and its arguments.
        launch: options of `tfdist launch`.
        script: the script.
    """

    def __init__(self, folder: Path, flags: list[str], launch: list[str], script: str = "scripts/train.py"):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log.txt"
        with open(self.log, "ab") as stream:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tfdist.cli",
                    "launch",
                    f"--log_dir={folder / 'logs'}",
                    *launch,
                    script,
                    *flags,
                ],
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TFDIST_TEST": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"},
                start_new_session=True,
            )

    def pid(self, worker: int) -> "int | None":
        """Returns the process of a worker, once it runs the script."""
        for pid in _children(self.process.pid):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for line in environ:
                if line.startswith(b"TF_CONFIG=") and json.loads(line[10:])["task"]["index"] == worker:
                    return pid
        return None

    def signal(self, worker: int, number: int) -> bool:
        """Signals a worker; returns whether there was one."""
        pid = self.pid(worker)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def printed(self) -> str:
        """Returns what has come out so far."""
        return self.log.read_text(errors="replace")

    def events(self, kind: str) -> list[dict]:
        """Returns the events of one kind that the launcher has written."""
        file = self.folder / "logs" / "events.jsonl"
        if not file.exists():
            return []
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]

    def until(self, condition: Callable[[], object], timeout_s: float = 90.0) -> None:
        """Waits for a condition, while the job runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the job has ended with {self.process.returncode}\n{self.printed()}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s\n{self.printed()}"
            time.sleep(0.005)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended in {timeout_s} s\n{self.printed()}") from None

    def end(self) -> None:
        """Ends what still runs."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
        self.process.wait(60)

    def assert_nothing_is_left(self, checkpoints: "Path | None" = None) -> None:
        """Checks that no process of the job runs, no port of it is bound, and no temporary file lies about."""
        mark = f"TFDIST_TEST={self.folder}".encode()
        left = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    left.append(environ.parent.joinpath("cmdline").read_bytes())
            except OSError:
                continue
        assert not left, left
        if checkpoints is not None:
            assert not list(checkpoints.glob(".*")), list(checkpoints.iterdir())


def listening_ports() -> set[int]:
    """Returns the TCP ports on which somebody listens on this machine."""
    ports = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def moment(generator: random.Random, most_s: float) -> float:
    """Returns a number of seconds up to `most_s`."""
    return generator.uniform(0.0, most_s)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
