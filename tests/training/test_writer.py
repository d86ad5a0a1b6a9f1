"""The thread that writes checkpoints rests between its pieces, and never where somebody waits for it."""

import os
import subprocess
import sys
import time

import pytest

from tfdist.training.writer import Writer

pytestmark = pytest.mark.timeout(90)


def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.fixture
def one_core(monkeypatch):
    """Of one core a fiftieth is left to the thread, so that it rests for 49 times as long as it works."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)


def test_it_rests_until_somebody_waits(one_core, wait_until):
    writer, done = Writer(), []

    def work(rest):
        spin(0.3)
        done.append(1)
        rest()
        done.append(2)

    writer.write(work, "a")
    wait_until(lambda: done)
    time.sleep(1)
    assert done == [1] and writer.busy
    began = time.monotonic()
    writer.wait()
    assert done == [1, 2] and not writer.busy and writer.error is None
    assert time.monotonic() - began < 4  # more than 13 s of the rest are left


def test_it_is_done_before_the_next_one_is_due(one_core, wait_until):
    writer = Writer()
    writer.write(lambda rest: None, "a")
    time.sleep(1)
    began = time.monotonic()
    writer.write(lambda rest: (spin(0.3), rest()), "b")
    wait_until(lambda: not writer.busy)
    assert time.monotonic() - began < 4


def test_what_is_given_up_fails_where_it_rests(one_core, wait_until):
    writer, done = Writer(), []

    def work(rest):
        spin(0.3)
        done.append(1)
        try:
            rest()
        except OSError:
            done.append("removed")
            raise
        done.append(2)

    writer.write(work, "a")
    wait_until(lambda: done)
    writer.abandon(20)
    assert done == [1, "removed"] and not writer.busy
    assert "given up" in writer.error.why


@pytest.mark.parametrize("end", ["", "raise ValueError"])
def test_a_process_that_ends_does_not_wait_for_rests(end):
    program = f"""
import atexit, os, time
os.sched_getaffinity = lambda _: {{0}}
from tfdist.training.writer import Writer
from tests.training.test_writer import spin
def work(rest):
    spin(0.3)
    rest()
    print("written", flush=True)
Writer().write(work, "a")
began = time.monotonic()
atexit.register(lambda: print("took", time.monotonic() - began))
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == bool(end), done.stderr
    words = done.stdout.split()
    assert words[:2] == ["written", "took"] and float(words[2]) < 5  # and not 15
