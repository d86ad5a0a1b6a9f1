"""Jobs that stop, or fail, while a checkpoint is being written. The workers have a pulse, and no TensorFlow."""

import json
import os
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(90)

# A worker that trains in steps of 0.05 s, and saves where it stops. The chief's last save takes SAVE seconds.
_WORKER = """
import atexit, contextlib, threading
from tfdist.liveness import Pulse
from tfdist.liveness.signals import StopSignals
from tfdist.liveness.stops import Preempted

options = dict(part.partition("=")[::2] for part in sys.argv[1:])
attempt = int(os.environ["TFDIST_ATTEMPT"])
pulse = Pulse(index, os.environ["TFDIST_MONITOR"])
pulse.saves = "unsaved" not in options

class Writer:
    busy = False
    def write(self, seconds):
        self.busy = True
        self.thread = threading.Thread(target=self.run, args=(seconds,))
        self.thread.start()
    def run(self, seconds):
        write("saving")
        time.sleep(seconds)
        write("saved")
        self.busy = False
    def wait(self, timeout_s=None):
        if self.busy:
            self.thread.join(timeout_s)
    abandon = wait

def end_by_error(why, code, for_good=False):
    # As an exception in `fit` ends a process, which takes a while, with all that TensorFlow has to free.
    atexit.register(time.sleep, 1)
    atexit.register(pulse.close)
    pulse.failed(why, by_others=False, for_good=for_good)
    pulse.enter("outside")
    sys.exit(code)

writer = Writer()
pulse.finish_before_exit(writer)
write(f"pid-{index}", str(os.getpid()))
pulse.enter("step")
with StopSignals(pulse) if pulse.saves else contextlib.nullcontext():
    try:
        for step in range(1, int(options.get("steps", 400))):
            pulse.stops.begin()
            time.sleep(0.05)
            pulse.stepped(step, 0.05)
            pulse.stops.end()
            pulse.enter("step")
            write(f"trains-{index}")
            if attempt == 0 and index == 0 and step == 5 and "background" in options:
                writer.write(float(options["background"]))
            if attempt == 0 and index == 1 and step == 10 and "fails" in options:
                sys.exit(3)
            if index == 1 and step == 10 and "ends" in options:
                end_by_error(**json.loads(options["ends"]))
            if attempt == 1 and step == 5:
                break
    except Preempted:
        if index == 0:
            with pulse.phase("save"):
                write("saving")
                time.sleep(float(options.get("save", 0)))
                if "full" in options:
                    pulse.failed("SaveError: No space left on device", by_others=False)
                    print("No space left on device")
                    sys.exit(1)
                write("saved")
        code = 75
    else:
        code = 0
pulse.enter("outside")
pulse.close()
sys.exit(code)
"""


@pytest.fixture
def job(script, start, wait_until, tmp_path):
    """Starts a job of two workers, and waits until both train; gives the launcher and the workers' ids."""

    def run(*args: str, options: "tuple[str, ...]" = ()):
        launcher = start("--workers=2", *options, script(_WORKER), *args)
        wait_until(lambda: all((tmp_path / f"trains-{index}").exists() for index in range(2)))
        return launcher, [int((tmp_path / f"pid-{index}").read_text()) for index in range(2)]

    return run


@pytest.mark.parametrize("whom", ["chief", "other", "launcher", "all"])
def test_a_last_save_may_take_longer_than_the_others_wait(job, tmp_path, remaining, whom):
    """Also where the signal goes to all processes at once, as it does to those of a control group."""
    launcher, pids = job("save=7")
    targets = {"chief": pids[:1], "other": pids[1:], "launcher": [launcher.pid], "all": [*pids, launcher.pid]}
    for pid in targets[whom]:
        os.kill(pid, signal.SIGTERM)
    text = launcher.communicate(timeout=40)[0].decode()
    assert launcher.returncode == 75, text
    assert (tmp_path / "saved").exists(), text
    assert "second signal (" not in text and "failed first" not in text
    assert remaining() == []


@pytest.mark.parametrize("whom", ["other", "launcher"])
def test_a_last_save_that_fails_is_a_failure(job, whom):
    launcher, pids = job("full", options=("--max_restarts=3",) if whom == "launcher" else ())
    os.kill(pids[1] if whom == "other" else launcher.pid, signal.SIGTERM)
    text = launcher.communicate(timeout=40)[0].decode()
    assert launcher.returncode == 1, text
    assert "worker 0 failed first, with exit code 1" in text and "restart 1" not in text


def test_a_chief_that_is_killed_in_its_last_save_is_a_failure(job, wait_until, tmp_path):
    launcher, pids = job("save=30")
    os.kill(pids[1], signal.SIGTERM)
    wait_until(lambda: (tmp_path / "saving").exists())
    os.kill(pids[0], signal.SIGKILL)
    text = launcher.communicate(timeout=40)[0].decode()
    assert launcher.returncode == 1, text
    assert "worker 0 failed first, ended by SIGKILL" in text


def test_a_second_signal_to_the_launcher_does_not_wait_for_the_save(job, wait_until, tmp_path):
    launcher, _ = job("save=60")
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: (tmp_path / "saving").exists())
    launcher.send_signal(signal.SIGTERM)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == 75 and "killing the workers" in text, text
    assert not (tmp_path / "saved").exists()


def test_a_save_in_the_background_ends_before_the_job_is_started_again(job, tmp_path):
    """It may take longer than the other workers are given to end: without it, steps would be repeated for nothing."""
    launcher, _ = job("background=8", "fails", options=("--max_restarts=1",))
    text = launcher.communicate(timeout=60)[0].decode()
    assert launcher.returncode == 0, text
    assert "worker 1 failed first, with exit code 3" in text and "worker 0 then ended, with exit code 1" in text
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_while_a_failed_attempt_ends_is_no_restart(job, wait_until, alive, tmp_path, number, code):
    """Also where the launcher looks at the signal before it looks at the worker."""
    launcher, pids = job("background=30", options=("--max_restarts=3", f"--log_dir={tmp_path / 'logs'}"))
    launcher.send_signal(signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not alive(pids[1]))
    launcher.send_signal(number)
    launcher.send_signal(signal.SIGCONT)
    text = launcher.communicate(timeout=40)[0].decode()
    assert launcher.returncode == code, text
    assert "worker 1 failed first, ended by SIGKILL" in text and "restart 1" not in text


@pytest.mark.parametrize(
    ("ends", "code", "restarted"),
    [
        ({"why": "ValueError: odd", "code": 1}, 0, True),
        ({"why": "it left by sys.exit(3)", "code": 3}, 0, True),
        ({"why": "UsageError: no such layer", "code": 2}, 2, False),
        ({"why": "SaveError: the disk is full", "code": 1, "for_good": True}, 1, False),
    ],
)
def test_a_worker_that_ends_by_an_error_is_let_end(job, ends, code, restarted):
    """The others have heard of it before it has gone; its exit code says whether to start it again."""
    launcher, _ = job(f"ends={json.dumps(ends)}", options=("--max_restarts=1",))
    text = launcher.communicate(timeout=60)[0].decode()
    assert launcher.returncode == code, text
    assert f"worker 1 failed first, with exit code {ends['code']}" in text and ends["why"] in text
    assert ("restart 1 of the job" in text, "not started again" in text) == (restarted, not restarted), text


@pytest.mark.parametrize("steps", [400, 20])
def test_a_launcher_that_was_stopped_itself_blames_nobody(job, wait_until, alive, steps):
    """Neither while the job goes on, nor where it has come to its end meanwhile."""
    launcher, pids = job(f"steps={steps}", options=("--max_restarts=1", "--hang_timeout=2"))
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(5)  # the wait is what is tested
    assert [alive(pid) for pid in pids] == [steps == 400] * 2
    launcher.send_signal(signal.SIGCONT)
    text = launcher.communicate(timeout=60)[0].decode()
    assert launcher.returncode == 0 and "failed first" not in text, text


@pytest.mark.parametrize(
    ("args", "options", "code"),
    [
        (["unsaved"], (), 143),
        (["unsaved"], ("--max_restarts=1",), 143),
        (["steps=20"], (), 0),
        (['ends={"why": "SaveError: full", "code": 1, "for_good": true}'], ("--max_restarts=1",), 1),
    ],
)
def test_sigterm_that_comes_with_the_end_of_the_workers(job, wait_until, alive, args, options, code):
    """The launcher sees both at once. What the signal to all has done is no failure, and what is done stays done."""
    launcher, pids = job(*args, options=options)
    launcher.send_signal(signal.SIGSTOP)
    if args == ["unsaved"]:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not alive(pids[1]))
    wait_until(lambda: code == 1 or not alive(pids[0]))
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGCONT)
    text = launcher.communicate(timeout=60)[0].decode()
    assert launcher.returncode == code, text


@pytest.mark.parametrize(("args", "code"), [([], 75), (["unsaved"], 143)])
def test_sigterm_asks_for_a_new_start_unless_what_was_trained_is_lost(job, args, code):
    launcher, _ = job(*args)
    launcher.send_signal(signal.SIGTERM)
    text = launcher.communicate(timeout=40)[0].decode()
    assert launcher.returncode == code, text


def test_events_that_cannot_be_written_do_not_end_the_job(job, tmp_path):
    (tmp_path / "logs" / "events.jsonl").mkdir(parents=True)
    launcher, _ = job("fails", options=("--max_restarts=1", f"--log_dir={tmp_path / 'logs'}"))
    text = launcher.communicate(timeout=40)[0].decode()
    assert launcher.returncode == 0, text
    assert text.count("no more events in") == 1 and "training goes on from step" in text
