"""Whether a place is well, by the exit code of a real command."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist.launch.health import HealthCheck

ROOT = Path(__file__).resolve().parents[2]


def looked_at(check, place):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (well := check.look(place)) is not None:
            return well
        time.sleep(0.01)
    raise AssertionError("the command has not ended")


def test_the_command_is_told_which_place_on_which_host():
    check = HealthCheck('test "$TFDIST_PLACE $TFDIST_HOST" = "1 user@b"', ("a", "user@b"))
    assert not looked_at(check, 0) and looked_at(check, 1)


def test_without_hosts_it_is_this_one():
    assert looked_at(HealthCheck(f'test "$TFDIST_HOST" = "{socket.gethostname()}"'), 0)


def test_without_a_command_all_are_well():
    assert HealthCheck().look(3)


def test_a_command_that_runs_on_is_ended_with_all_it_started(tmp_path):
    held = tmp_path / "held"
    os.mkfifo(held)
    check = HealthCheck(f"sleep 30 > {held}; true")
    assert check.look(0) is None
    with open(held) as reader:  # its end comes when nobody has it open for writing any more
        assert check.look(0) is None
        check.close()
        assert select.select([reader], [], [], 10)[0] and reader.read() == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_does_not_wait_for_a_check(tmp_path, number, code):
    asked = tmp_path / "asked"
    script = tmp_path / "script.py"
    script.write_text("")
    command = [sys.executable, "-m", "tfdist.cli", "launch", "--workers=1"]
    launcher = subprocess.Popen(
        [*command, f"--health_check=touch {asked}; sleep 50", str(script)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 30
        while not asked.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        launcher.send_signal(number)
        assert launcher.wait(20) == code
    finally:
        launcher.kill()
        launcher.communicate()
