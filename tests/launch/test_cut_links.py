"""A link between two hosts that goes down: the worker behind it is named, and the job goes on when it is up again."""

import random
import subprocess
import time

import pytest

from scripts.bench.links import can_be_made, link
from tests.launch.running import RunningJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_be_made(), reason="links between namespaces take root and iproute2"),
]
ROUNDS, HANG_TIMEOUT_S = 5, 3
RSH = """#!/bin/sh
case $1 in
  {hosts[0]}) exec {prefixes[0]} sh -c "$2" ;;
  {hosts[1]}) exec {prefixes[1]} sh -c "$2" ;;
esac
"""


def test_a_cut_link(tmp_path):
    generator = random.Random(7)
    plain = RunningJob(
        tmp_path / "plain", ["loop", str(tmp_path / "plain")], ["--workers=2"], "tests/launch/survivor.py"
    )
    assert plain.wait() == 0, plain.printed()
    with link("1gbit") as ends:
        rsh = tmp_path / "rsh"
        rsh.write_text(RSH.format(hosts=ends.hosts, prefixes=[" ".join(prefix) for prefix in ends.prefixes]))
        rsh.chmod(0o755)
        folder = tmp_path / "cut"
        options = [
            f"--hosts={','.join(ends.hosts)}",
            f"--rsh={rsh}",
            f"--hang_timeout={HANG_TIMEOUT_S}",
            "--max_restarts=5",
            *(f"--env={name}" for name in ("PACE", "OMP_NUM_THREADS", "TFDIST_TEST")),
        ]
        job = RunningJob(
            folder, ["loop", str(folder)], options, "tests/launch/survivor.py", prefix=ends.prefixes[0], PACE="0.05"
        )
        try:
            for round_ in range(ROUNDS):
                job.until(lambda seen=round_: len(job.events("resumed")) >= seen and (folder / "steps").exists())
                time.sleep(generator.uniform(0.0, 0.5))
                set_link(ends, "down")
                cut_at = time.monotonic()
                job.until(lambda seen=round_: len(job.events("failure")) > seen, timeout_s=30)
                assert time.monotonic() - cut_at < HANG_TIMEOUT_S + 8
                set_link(ends, "up")
                event = job.events("failure")[-1]
                assert event["worker"] == 1 and event["host"] == ends.hosts[1], job.printed()
                assert "worker 1 (" in event["why"] and "cut off from the network" in event["why"], event
            assert job.wait() == 0, job.printed()
        finally:
            job.end()
        assert (folder / "weights-0").read_text() == (tmp_path / "plain" / "weights-0").read_text()
        assert all(event["repeated_steps"] <= 5 + 3 for event in job.events("resumed"))
        job.assert_nothing_is_left(folder / "checkpoints")


def set_link(ends, state):
    """Takes the second host's end of the link down, or up again."""
    namespace = ends.prefixes[1][-1]
    end = next(iter(ends.environments[1]["GLOO_SOCKET_IFNAME"].split()))
    subprocess.run(["ip", "-n", namespace, "link", "set", end, state], check=True)
