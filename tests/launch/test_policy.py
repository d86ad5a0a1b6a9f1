"""When a job is started again, and where: the policies, without processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.errors import UsageError
from tfdist.launch.policy import Places, RestartBudget, RestartPolicy


def test_a_budget_is_spent_and_comes_back_with_progress():
    budget = RestartBudget(RestartPolicy(3, 1000.0))
    assert [budget.wait_s(now) for now in (0, 1, 2, 3)] == [0.0, 1.0, 2.0, None]
    assert not budget.progressed(None) and budget.wait_s(4) is None
    assert budget.progressed(10) and budget.wait_s(5) == 0.0
    assert not budget.progressed(10) and not budget.progressed(9)
    assert budget.wait_s(6) == 1.0 and budget.total == 5


def test_restarts_beyond_the_window_do_not_count():
    budget = RestartBudget(RestartPolicy(1, 60.0))
    assert budget.wait_s(0) == 0.0
    assert budget.wait_s(59) is None
    assert budget.wait_s(60) == 0.0


def test_waits_have_an_end():
    budget = RestartBudget(RestartPolicy(20, 1e9))
    assert max(budget.wait_s(now) for now in range(20)) == 60.0


@pytest.mark.parametrize("most", [-1, 1.5, True, "2"])
def test_wrong_restarts(most):
    with pytest.raises(UsageError, match=r"\(--max_restarts\): an integer from 0 is needed"):
        RestartPolicy(most)


@pytest.mark.parametrize("window", [0, -1, float("inf"), float("nan"), True, "1"])
def test_wrong_window(window):
    with pytest.raises(UsageError, match=r"\(--restart_window\): a number of seconds above 0"):
        RestartPolicy(1, window)


def test_a_place_is_left_out_at_its_second_failure_in_a_row():
    places = Places(3, 2)
    assert not places.failed(1, 0.0, progress=False)
    assert not places.failed(2, 1.0, progress=True)  # the first one no longer counts
    assert not places.failed(1, 2.0, progress=False)
    assert places.failed(1, 3.0, progress=False) and places.active == [0, 2]
    assert not places.failed(2, 4.0, progress=False) or places.active == [0, 2]  # never fewer than two
    assert places.due(62.0) == [] and places.due(63.0) == [1]
    assert places.unwell(1, 63.0)
    assert places.due(64.0) == [] and places.due(68.0) == [1]
    places.back(1)
    assert places.active == [0, 1, 2]
    places.failed(1, 199.0, progress=False)
    assert places.failed(1, 200.0, progress=False)
    assert places.due(319.0) == [] and places.due(320.0) == [1]  # twice as long as the first time
    assert not places.unwell(0, 201.0) and places.active == [0, 2]


@given(st.integers(1, 6), st.data())
def test_there_are_always_places_enough(count, data):
    least = data.draw(st.integers(1, count))
    places = Places(count, least)
    for now in range(30):
        place = data.draw(st.sampled_from(places.active))
        places.failed(place, float(now * 50), progress=data.draw(st.booleans()))
        for back in places.due(now * 50.0):
            places.back(back)
        assert least <= len(places.active) <= count


@pytest.mark.parametrize("least", [0, 4, True, 1.0])
def test_wrong_min_workers(least):
    with pytest.raises(UsageError, match=r"\(--min_workers\): an integer from 1 to 3 is needed"):
        Places(3, least)
