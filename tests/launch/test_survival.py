"""Jobs that are killed, stopped, cut off and preempted at many moments end with the model of an undisturbed job."""

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launch.running import RunningJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SURVIVOR = "tests/launch/survivor.py"
STEPS, EVERY = 60, 5


def survivor(folder: Path, kind: str, launch: list[str], **plant: str) -> RunningJob:
    """Starts the job of `survivor.py`."""
    return RunningJob(folder, [kind, str(folder)], launch, script=SURVIVOR, **plant)


def finished(job: RunningJob, code: int = 0) -> None:
    try:
        assert job.wait() == code, job.printed()
    finally:
        job.end()


def weights(folder: Path, workers: int = 2) -> set[str]:
    return {(folder / f"weights-{index}").read_text() for index in range(workers)}


def steps(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "steps").read_text().split()]


def assert_repeats_no_more(job: RunningJob, most: int) -> None:
    for event in job.events("resumed"):
        assert 0 <= event["repeated_steps"] <= most, event


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folders of jobs that nobody disturbs, by kind."""
    folders = {}
    for kind in ("fit", "loop"):
        folder = tmp_path_factory.mktemp(kind)
        finished(survivor(folder, kind, ["--workers=2"]))
        folders[kind] = folder
    assert steps(folders["fit"]) == list(range(1, STEPS + 1))
    assert all(len(weights(folder)) == 1 for folder in folders.values())
    return folders


@pytest.mark.parametrize("number", range(4))
def test_killed_workers(undisturbed, tmp_path, number):
    """Five kills a job, at random moments; every third one while the chief writes a checkpoint.

    Two of the jobs wait for their saves, and repeat `checkpoint_every` steps at most; the others, whose newest
    checkpoint may be lost with the chief, twice as many.
    """
    generator = random.Random(number)
    kind = ("fit", "loop")[number % 2]
    sync = {"SYNC": "1"} if number < 2 else {}
    # Each call of the compiled loop takes a while, so that moments are spread over the job.
    job = survivor(tmp_path, kind, ["--workers=2", "--max_restarts=5"], PACE="0.05", SLOW="save", SECONDS="0.3", **sync)
    saves = tmp_path / "checkpoints"
    try:
        for round_ in range(5):
            during_save = (number * 5 + round_) % 3 == 0
            job.until(lambda seen=round_: len(job.events("resumed")) >= seen)
            if during_save:
                for mark in tmp_path.glob("at-save-*"):
                    mark.unlink()  # then the next save is slow again
                job.until(lambda: list(tmp_path.glob("at-save-*")))
                time.sleep(generator.uniform(0.0, 0.4))
            else:
                time.sleep(generator.uniform(0.0, 0.6))
            worker = generator.randrange(2)
            assert job.process.poll() is None, job.printed()
            job.until(lambda worker=worker: job.signal(worker, signal.SIGKILL))
            killed_at = time.time()
            job.until(lambda seen=round_: len(job.events("failure")) > seen, timeout_s=20)
            event = job.events("failure")[-1]
            assert (event["worker"], event["code"]) == (worker, -signal.SIGKILL), job.printed()
            assert event["at"] - killed_at < 1
        finished(job)
    finally:
        job.end()
    assert weights(tmp_path) == weights(undisturbed[kind])
    assert len(job.events("failure")) == 5
    assert_repeats_no_more(job, EVERY if sync else 2 * EVERY)
    job.assert_nothing_is_left(saves)


@pytest.mark.parametrize("number", range(2))
def test_stopped_workers(undisturbed, tmp_path, number):
    """Five SIGSTOPs a job: found within the hang_timeout and a little, named, with a stack, and recovered from."""
    generator = random.Random(100 + number)
    kind = ("fit", "loop")[number % 2]
    job = survivor(tmp_path, kind, ["--workers=2", "--max_restarts=5", "--hang_timeout=3"], PACE="0.05")
    try:
        for round_ in range(5):
            job.until(lambda seen=round_: len(job.events("resumed")) >= seen and steps_done(tmp_path))
            time.sleep(generator.uniform(0.0, 0.5))
            worker = generator.randrange(2)
            job.until(lambda worker=worker: job.signal(worker, signal.SIGSTOP))
            stopped_at = time.time()
            job.until(lambda seen=round_: len(job.events("failure")) > seen, timeout_s=20)
            event = job.events("failure")[-1]
            assert event["at"] - stopped_at < 3 + 1
            assert event["worker"] == worker, job.printed()
            assert f"worker {worker} (" in event["why"] and "has said nothing for" in event["why"]
            assert any("most recent call first" in line for line in event["last_lines"]), event["last_lines"]
        finished(job)
    finally:
        job.end()
    assert weights(tmp_path) == weights(undisturbed[kind])
    assert_repeats_no_more(job, 2 * EVERY)
    job.assert_nothing_is_left(tmp_path / "checkpoints")


def test_a_pause_that_is_shorter_than_the_hang_timeout_is_no_failure(undisturbed, tmp_path):
    """TensorFlow by itself would end the job after 10 s."""
    job = survivor(tmp_path, "loop", ["--workers=2", "--hang_timeout=60"], PACE="0.05")
    try:
        job.until(lambda: steps_done(tmp_path))
        job.signal(1, signal.SIGSTOP)
        time.sleep(16)
        job.signal(1, signal.SIGCONT)
        finished(job)
    finally:
        job.end()
    assert not job.events("failure") and weights(tmp_path) == weights(undisturbed["loop"])


PHASES = ["start", "trace", "data", "step", "evaluation", "callback", "save", "anywhere", "anywhere", "second"]


@pytest.mark.parametrize("number", range(len(PHASES)), ids=[f"{i}-{phase}" for i, phase in enumerate(PHASES)])
def test_preempted_workers(undisturbed, tmp_path, number):
    """SIGTERM on one worker, in each phase: all end with 75, and the next start goes on at that very step."""
    phase, generator = PHASES[number], random.Random(200 + number)
    kind = ("fit", "loop")[number % 2] if phase != "data" else "fit"
    plant = {"SLOW": phase, "SECONDS": "2", "AT": "20" if phase in ("data", "step", "callback") else "1"}
    job = survivor(tmp_path, kind, ["--workers=2"], **({"PACE": "0.05"} if phase in ("anywhere", "second") else plant))
    worker = generator.randrange(2)
    try:
        if phase == "start":
            job.until(lambda: job.pid(worker))
            time.sleep(generator.uniform(2.0, 4.0))
        elif phase in ("anywhere", "second"):
            job.until(lambda: steps_done(tmp_path))
            time.sleep(generator.uniform(0.0, 1.5))
        else:
            job.until(lambda: list(tmp_path.glob(f"at-{phase}-*")))
        job.signal(worker, signal.SIGTERM)
        if phase == "second":
            asked_at = time.monotonic()
            job.signal(worker, signal.SIGTERM)
        finished(job, 75)
    finally:
        job.end()
    if phase == "second":
        assert time.monotonic() - asked_at < 8
    done = steps(tmp_path) if (tmp_path / "steps").exists() else []
    if phase in ("start", "trace"):
        assert not done
    elif phase != "second":
        kept = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "checkpoints").iterdir())
        assert kept[-1] == done[-1], (kept, done)
    job.assert_nothing_is_left(tmp_path / "checkpoints")
    again = survivor(tmp_path, kind, ["--workers=2"])
    finished(again)
    if phase != "second":
        assert steps(tmp_path) == steps(undisturbed[kind]), "a step was missed, or done twice"
    assert weights(tmp_path) == weights(undisturbed[kind])
    assert losses(tmp_path).keys() == losses(undisturbed[kind]).keys()
    again.assert_nothing_is_left(tmp_path / "checkpoints")


def test_a_job_shrinks_to_the_workers_that_are_left(tmp_path):
    """One of three workers is lost for good: the other two go on with the same global batch, and the same losses."""
    plain, shrunk = tmp_path / "plain", tmp_path / "shrunk"
    finished(survivor(plain, "fit", ["--workers=3"]))
    job = survivor(shrunk, "fit", ["--workers=3", "--min_workers=2", "--max_restarts=3"], LOST="1")
    finished(job)
    assert "place 1 has failed twice in a row, and is left out" in job.printed()
    assert [event["worker"] for event in job.events("failure")] == [1, 1]
    expected, found = losses(plain), losses(shrunk)
    assert found.keys() == expected.keys() == set(range(4))
    for epoch in expected:
        np.testing.assert_allclose(found[epoch]["val_loss"], expected[epoch]["val_loss"], rtol=1e-5)
    assert len(weights(shrunk)) == 1
    job.assert_nothing_is_left(shrunk / "checkpoints")


def test_a_job_grows_again_when_a_place_is_well(tmp_path):
    """A place that is not well at the start is left out; when it is well, the job takes it in at a checkpoint."""
    plain, grown = tmp_path / "plain", tmp_path / "grown"
    finished(survivor(plain, "fit", ["--workers=2"]))
    well = tmp_path / "well"
    check = f"test $TFDIST_PLACE = 0 || test -e {well}"
    options = ["--workers=2", "--min_workers=1", "--max_restarts=1", f"--health_check={check}"]
    job = survivor(grown, "fit", options, PACE="0.3")
    try:
        job.until(lambda: steps_done(grown))
        well.touch()
        finished(job)
    finally:
        job.end()
    assert "place 1 is not well" in job.printed() and "stopping: place 1 is back" in job.printed()
    assert steps(grown) == steps(plain)
    np.testing.assert_allclose(losses(grown)[3]["val_loss"], losses(plain)[3]["val_loss"], rtol=1e-5)


def test_recovery_takes_two_seconds_and_a_start(tmp_path):
    """From loss to training again: the start-up of the new processes themselves, and at most 2 s."""
    job = survivor(tmp_path, "loop", ["--workers=2", "--max_restarts=1"], PACE="0.05")
    try:
        job.until(lambda: steps_done(tmp_path))
        job.signal(1, signal.SIGKILL)
        finished(job)
    finally:
        job.end()
    (event,) = job.events("resumed")
    assert 0 < event["lost_s"] - event["start_s"] <= 2, event


def steps_done(folder: Path) -> bool:
    return (folder / "steps").exists()


def losses(folder: Path) -> dict[int, dict]:
    if not (folder / "losses").exists():
        return {}
    lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    return {line["epoch"]: line for line in lines}
