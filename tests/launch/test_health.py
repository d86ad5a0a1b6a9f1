"""Whether a place is well, by the exit code of a real command."""

import os
import select
import signal
import socket

import pytest

from tfdist.launch.health import HealthCheck


@pytest.fixture
def looked_at(wait_until):
    """Looks at a place until the check has its answer, and gives that."""

    def look(check, place):
        found = []
        wait_until(lambda: found.append(check.look(place)) or found[-1] is not None)
        return found[-1]

    return look


def test_the_command_is_told_which_place_on_which_host(looked_at):
    check = HealthCheck('test "$TFDIST_PLACE $TFDIST_HOST" = "1 user@b"', ("a", "user@b"))
    assert not looked_at(check, 0) and looked_at(check, 1)


def test_without_hosts_it_is_this_one(looked_at):
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_does_not_wait_for_a_check(script, start, wait_until, tmp_path, number, code):
    asked = tmp_path / "asked"
    launcher = start("--workers=1", f"--health_check=touch {asked}; sleep 50", script(""))
    wait_until(asked.exists)
    launcher.send_signal(number)
    assert launcher.wait(20) == code
