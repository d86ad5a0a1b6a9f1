"""Plans: order, resumption, and what is refused."""

import json

import pytest

from tfdist.errors import UsageError
from tfdist.scaling.machine import Machine
from tfdist.scaling.plan import Plan, Trial, parse_modes, parse_replicas


def test_trials_are_interleaved_and_say_what_they_are():
    trials = Plan(("train.py",), (1, 2, 4), repeats=2).trials()
    assert len(trials) == len(set(trials)) == 2 * (1 + 2 * 4)
    assert trials[0] == Trial(0, "strong", 1, False)
    assert [t.name for t in trials[1:5]] == ["strong-2-0", "strong-2-noop-0", "weak-2-0", "weak-2-noop-0"]
    assert [t.repeat for t in trials] == [0] * 9 + [1] * 9
    assert trials[9].replicas == 4 and trials[-1].replicas == 1  # every other round backwards


def test_a_plan_is_kept_and_another_is_refused(tmp_path):
    plan = Plan(("train.py", "--steps=3"), (1, 2))
    plan.keep_in(tmp_path / "new")
    plan.keep_in(tmp_path / "new")
    Plan(plan.command, (1, 2, 3), repeats=5).keep_in(tmp_path / "new")  # more of the same
    kept = (tmp_path / "new" / "plan.json").read_text()
    with pytest.raises(UsageError, match="sweep of another command"):
        Plan(("other.py",), (1, 2)).keep_in(tmp_path / "new")
    assert (tmp_path / "new" / "plan.json").read_text() == kept
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="nothing was overwritten"):
        plan.keep_in(tmp_path / "full")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "plan.json").write_text("{")
    with pytest.raises(UsageError, match="unreadable"):
        plan.keep_in(tmp_path / "damaged")
    assert json.loads(kept)["command"] == ["train.py", "--steps=3"]


@pytest.mark.parametrize("text", ["", "0", "1,x", "-1", "1,,2", "1.5"])
def test_replicas_that_are_none(text):
    with pytest.raises(UsageError, match=f"--replicas={text}"):
        parse_replicas(text)


def test_texts():
    assert parse_replicas("4,1,2,2") == (1, 2, 4)
    assert parse_modes("weak,strong") == ("strong", "weak")
    with pytest.raises(UsageError, match="--modes=strongest"):
        parse_modes("strongest")


def test_machines():
    assert [Machine(0, 2).sharing(n) for n in (1, 2, 3, 5)] == [1, 1, 2, 3] and Machine(4, 2).sharing(4) == 1
    with pytest.raises(UsageError, match=r"8 replicas are more than the 4 GPU\(s\)"):
        Machine(4, 64).require(8, oversubscribe=True)
    with pytest.raises(UsageError, match=r"3 replicas are more than the 2 core\(s\).*--oversubscribe"):
        Machine(0, 2).require(3, oversubscribe=False)
    Machine(0, 2).require(3, oversubscribe=True)
    Machine(4, 1).require(4, oversubscribe=False)
