"""Signals to a running launcher reach all workers, and nothing is left behind however it ends."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

# Each worker has a child; both write down who they are. `ignore` makes both deaf to the polite signals.
_FAMILY = """
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
try:
    print("up", flush=True)
    write(f"pids-{index}", f"{os.getpid()} {child.pid}")
    time.sleep(100)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(5)
"""


@pytest.fixture
def family(script, start, wait_until, tmp_path):
    """Starts a launcher of two workers with a child each; gives it and the ids of all four processes."""

    def run(*args: str, **options: object) -> tuple[subprocess.Popen, list[int]]:
        launcher = start("--workers=2", script(_FAMILY), *args, **options)
        files = [tmp_path / "pids-0", tmp_path / "pids-1"]
        wait_until(lambda: all(file.exists() for file in files))
        return launcher, [int(pid) for file in files for pid in file.read_text().split()]

    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 129)])
def test_a_signal_reaches_all_and_leaves_nothing(number, code, family, alive, remaining):
    launcher, pids = family()
    assert all(map(alive, pids))
    launcher.send_signal(number)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == code, text
    assert not any(map(alive, pids))
    assert remaining() == []
    assert f"passing {number.name} on" in text
    assert text.count("interrupted") == (2 if number == signal.SIGINT else 0)
    assert "failed first" not in text


def test_sigint_reaches_workers_even_where_the_shell_had_it_ignored(family, alive):
    # As a shell without job control does for `tfdist launch ... &`.
    launcher, pids = family(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    launcher.send_signal(signal.SIGINT)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == 130 and text.count("interrupted") == 2
    assert not any(map(alive, pids))


def test_workers_take_sigquit_where_the_shell_had_it_ignored(family):
    """At which a hung worker prints its stacks. The launcher itself goes on ignoring it."""
    launcher, pids = family(preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_IGN))
    launcher.send_signal(signal.SIGQUIT)
    for pid in pids[::2]:
        os.kill(pid, signal.SIGQUIT)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == 1 and "SIGQUIT" in text, text


def test_nohup_is_respected(family, alive, wait_until):
    launcher, pids = family(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 75


def test_a_second_signal_kills(family, alive):
    launcher, pids = family("ignore")
    launcher.send_signal(signal.SIGTERM)
    seen = b""
    while b"passing SIGTERM on" not in seen:
        seen += launcher.stdout.readline()
    assert all(map(alive, pids[::2]))
    launcher.send_signal(signal.SIGTERM)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == 75 and "killing the workers" in text
    assert not any(map(alive, pids))


@pytest.mark.parametrize("args", [(), ("ignore",)])
def test_kill_9_of_the_launcher_leaves_nothing(args, family, alive, wait_until, remaining):
    launcher, pids = family(*args)
    os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.wait(timeout=20) == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, pids)))
    wait_until(lambda: not remaining())


def test_children_left_by_a_worker_that_succeeded_are_ended(script, start, alive, tmp_path):
    path = script(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "write(f'pid-{index}', str(child.pid))\n"
    )
    launcher = start("--workers=2", path)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 0
    assert not any(alive(int((tmp_path / f"pid-{index}").read_text())) for index in range(2))


def test_nothing_is_left_after_a_normal_end(script, start, remaining):
    launcher = start("--workers=1", script("print('done')"))
    assert remaining()
    launcher.communicate(timeout=20)
    assert launcher.returncode == 0
    assert remaining() == []


def test_workers_end_when_nobody_reads_their_output_any_more(script, start, alive, wait_until, tmp_path):
    path = script("write(f'pid-{index}', str(os.getpid()))\nwhile True: print('x'); time.sleep(0.01)\n")
    launcher = start("--workers=2", path, stderr=subprocess.PIPE)
    launcher.stdout.readline()
    wait_until(lambda: all((tmp_path / f"pid-{index}").exists() for index in range(2)))
    launcher.stdout.close()
    errors = launcher.stderr.read()
    assert launcher.wait(timeout=20) == 128 + signal.SIGPIPE
    assert errors == b""
    assert not any(alive(int((tmp_path / f"pid-{index}").read_text())) for index in range(2))


def test_launch_works_outside_the_main_thread(script):
    program = (
        "import sys, threading, tfdist.launch as l\n"
        "codes = []\n"
        f"thread = threading.Thread(target=lambda: codes.append(l.launch(2, [{script('print(index)')!r}])))\n"
        "thread.start(); thread.join(); sys.exit(codes[0])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [b"[worker 0] 0", b"[worker 1] 1"]
