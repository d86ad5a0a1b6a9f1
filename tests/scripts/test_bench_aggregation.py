"""The aggregation benchmark: its links are as slow as they say, its rows come out, and nothing of it stays behind."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench.links import can_be_made, link

ROOT = Path(__file__).resolve().parents[2]
NEEDS_ROOT = pytest.mark.skipif(not can_be_made(), reason="making network namespaces needs root and iproute2")

RECEIVE = """
import socket
with socket.create_server(("10.203.0.1", 5000)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
"""
SEND = """
import socket, sys
with socket.create_connection(("10.203.0.1", 5000), timeout=20) as connection:
    connection.sendall(bytes(int(sys.argv[1])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@NEEDS_ROOT
def test_a_link_is_as_slow_as_it_says_and_is_removed():
    before = namespaces()
    with link("200mbit") as made:
        receiver = subprocess.Popen([*made.prefixes[0], sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
        try:
            assert receiver.stdout.readline() == b"up\n"
            start = time.monotonic()
            sent = 10_000_000
            subprocess.run([*made.prefixes[1], sys.executable, "-c", SEND, str(sent)], check=True, timeout=60)
            receiver.wait(30)
        finally:
            receiver.kill()
            receiver.wait()
        assert time.monotonic() - start >= 0.9 * 8 * sent / 200e6
    assert namespaces() == before


@NEEDS_ROOT
def test_a_link_is_removed_after_an_error():
    before = namespaces()
    with pytest.raises(RuntimeError, match="mine"), link("1gbit"):
        raise RuntimeError("mine")
    assert namespaces() == before


def bench(*args: str, timeout: float = 280) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/bench_aggregation.py", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
def test_rows_of_a_short_run(tmp_path):
    out = tmp_path / "rows.json"
    done = bench(
        "--links=loopback",
        "--models=transformer",
        "--hooks=allreduce@collective;bf16@mpi",
        "--rounds=1",
        "--steps=1",
        "--notorch",
        f"--json={out}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["hook"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"noop", "barrier", "stock", "allreduce", "bf16"}
    assert rows["noop"]["to_ceiling"] == rows["stock"]["to_stock"] == 1.0
    assert rows["noop"]["bytes"] == 0 and rows["bf16"]["bytes"] < 0.6 * rows["allreduce"]["bytes"]
    assert rows["allreduce"]["bytes"] >= rows["stock"]["bytes"]  # the embedding's gradient stays sparse
    assert all(row["ms"] > 0 and f"| {hook} |" in done.stdout for hook, row in rows.items())


@pytest.mark.parametrize(
    ("args", "words"),
    [(("--links=2gbit",), "--links=2gbit: choose out of loopback"), (("--models=mlp",), "--models=mlp: choose out of")],
)
def test_wrong_use(args, words):
    done = bench(*args, timeout=60)
    assert done.returncode == 2 and words in done.stderr
