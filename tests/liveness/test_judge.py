"""Who is blamed, for what: by hand, and for random states of workers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.errors import UsageError
from tfdist.liveness.beat import COMPUTING, PHASES, READING, STAGES, WAITING, Beat
from tfdist.liveness.judge import Limits, Seen, Verdict, judge, suspect

LIMITS = Limits(30)
WAITS = Beat("step", 7, WAITING, 40.0)


def seen(index, beat, **more):
    return Seen(index, f"host{index}:1", beat, **more)


@pytest.mark.parametrize(
    ("beat", "words"),
    [
        (Beat("step", 7, READING, 41.0), "worker 1 (host1:1) is stuck reading the data of step 8"),
        (Beat("step", 7, COMPUTING, 41.0), "worker 1 (host1:1) is stuck computing of step 8"),
        (Beat("data", 7, 0, 41.0), "worker 1 (host1:1) is stuck reading the data for step 8"),
        (Beat("callback", 7, 0, 601.0), "worker 1 (host1:1) is stuck in a callback, or between two steps"),
        (Beat("save", 7, 0, 601.0), "worker 1 (host1:1) is stuck saving a checkpoint"),
    ],
)
def test_the_one_that_the_others_wait_for_is_blamed(beat, words):
    verdict = judge([seen(0, WAITS), seen(1, beat), seen(2, WAITS)], LIMITS)
    assert verdict.kind == "stuck" and verdict.workers == (1,)
    assert words in verdict.text
    assert "Waiting for it: worker 0 waiting in the all-reduce of step 8, worker 2 waiting" in verdict.text


@pytest.mark.parametrize("phase", ["trace", "first", "evaluation", "save", "callback", "start"])
def test_what_may_take_long_is_no_hang(phase):
    """Twenty times the limit; those that wait for it are patient."""
    assert judge([seen(0, Beat("step", 7, WAITING, 599.0)), seen(1, Beat(phase, 7, 0, 599.0))], LIMITS) is None
    assert judge([seen(0, WAITS), seen(1, Beat(phase, 7, 0, 601.0))], LIMITS).workers == (1,)


def test_a_step_may_take_five_times_the_longest_one():
    slow = Beat("step", 7, COMPUTING, 99.0, slowest_s=20.0)
    assert judge([seen(0, slow)], LIMITS) is None
    assert judge([seen(0, Beat("step", 7, COMPUTING, 101.0, slowest_s=20.0))], LIMITS).workers == (0,)


def test_one_that_computes_may_wait_for_one_that_reads():
    verdict = judge([seen(0, Beat("step", 7, COMPUTING, 40.0)), seen(1, Beat("step", 7, READING, 40.0))], LIMITS)
    assert verdict.workers == (1,)


def test_all_wait_for_each_other():
    verdict = judge([seen(0, WAITS), seen(1, WAITS)], LIMITS)
    assert verdict.workers == (0, 1) and "all workers wait for each other" in verdict.text
    assert judge([seen(0, WAITS), seen(1, Beat("step", 6, WAITING, 40.0))], LIMITS).workers == (1,)


def test_one_whose_script_does_something_else_is_blamed_late():
    def waited(seconds):
        return [seen(0, Beat("step", 7, WAITING, seconds)), seen(1, Beat("outside", 7))]

    assert judge(waited(599.0), LIMITS) is None
    assert judge(waited(601.0), LIMITS).workers == (1,)


def test_lost_and_silent_workers():
    lost = judge([seen(0, WAITS), seen(1, Beat("trace"), connected=False)], LIMITS)
    assert lost.kind == "lost" and lost.workers == (1,)
    assert "worker 1 (host1:1) has ended without a word, tracing and compiling a function" in lost.text
    failed = judge([seen(0, WAITS), seen(1, Beat("outside"), connected=False, failed="ValueError: x")], LIMITS)
    assert failed.workers == (1,) and "has failed: ValueError: x" in failed.text
    silent = judge([seen(0, WAITS), seen(1, Beat("step", 7, 1), silent_s=31.0)], LIMITS)
    assert silent.kind == "silent" and silent.workers == (1,) and "stopped, or cut off" in silent.text
    early = suspect([seen(0, WAITS), seen(1, Beat("step", 7, 1), silent_s=9.0)])
    assert early.workers == (1,) and suspect([seen(0, WAITS)]) is None


def test_who_has_left_or_not_begun_is_left_alone():
    gone = seen(1, Beat("step", 3), connected=False, left=True)
    assert judge([seen(0, Beat("step", 7, COMPUTING, 1.0)), gone, seen(2, None)], LIMITS) is None
    ended = seen(1, Beat("outside"), connected=False, failed="ValueError: x")
    assert judge([seen(0, Beat("outside")), ended], LIMITS) is None


BEATS = st.builds(
    Beat,
    st.sampled_from(sorted(PHASES)),
    st.integers(0, 9),
    st.integers(0, len(STAGES) - 1),
    st.floats(0, 1e4),
    st.floats(0, 100),
)


@given(st.lists(st.tuples(BEATS, st.floats(0, 100), st.booleans(), st.booleans()), min_size=1, max_size=6))
@settings(deadline=None, max_examples=300)
def test_a_worker_that_only_waits_is_never_blamed_alone(states):
    workers = [
        seen(i, beat, silent_s=silent, connected=connected, left=left)
        for i, (beat, silent, connected, left) in enumerate(states)
    ]
    verdict = judge(workers, LIMITS)
    if verdict is None:
        return
    assert verdict.workers
    assert "all workers" in verdict.text or all(f"worker {index} (" in verdict.text for index in verdict.workers)
    assert Verdict.from_message(verdict.to_message()) == verdict
    for index in verdict.workers:
        worker = workers[index]
        if worker.beat.waits and worker.connected and worker.silent_s <= 30:
            assert all(w.beat.waits or not w.matters for w in workers)


@given(BEATS)
@settings(deadline=None)
def test_beats_travel(beat):
    message = beat.to_message()
    assert Beat.from_message(message) == beat
    for wrong in ({"phase": "?"}, {"stage": 4}, {"step": -1}, {"still_s": None}, {"done": True}):
        assert Beat.from_message({**message, **wrong}) is None


@pytest.mark.parametrize("value", [0.5, -1, float("nan"), float("inf"), "30", True, None])
def test_wrong_limits(value):
    with pytest.raises(UsageError, match="hang_timeout=.*a number of seconds of at least 1"):
        Limits(value)
