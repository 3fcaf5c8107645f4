"""What is kept, what goes, and that a look-up waits for nobody."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from detkern.dispatch.plan_cache import PlanCache


def test_a_plan_is_found_by_an_equal_key() -> None:
    plans: PlanCache[tuple[int, ...], list[int]] = PlanCache(4)
    assert plans.get((1, 2)) is None
    assert plans.recall((1, 2)) is None
    plan = [7]
    assert plans.keep((1, 2), plan) is plan
    assert plans.get((1, 2)) is plan
    assert len(plans) == 1
    plans.clear()
    assert (plans.get((1, 2)), plans.recall((1, 2)), len(plans)) == (None, None, 0)


def test_what_was_not_used_for_longest_goes() -> None:
    plans: PlanCache[int, str] = PlanCache(4)
    for key in range(5):
        plans.keep(key, str(key))
    assert [plans.get(key) or plans.recall(key) for key in range(5)] == [None, None, "2", "3", "4"]
    assert len(plans) <= 4


def test_one_that_is_used_all_along_outlives_any_number_that_are_used_once() -> None:
    plans: PlanCache[int, str] = PlanCache(8)
    plans.keep(-1, "hot")
    for key in range(1000):
        assert (plans.get(-1) or plans.recall(-1)) == "hot", key
        plans.keep(key, str(key))
        assert len(plans) <= 8


def test_what_goes_is_given_back_one_by_one() -> None:
    """A hundred at once would be a call that takes as long as ten."""

    class Plan:
        def __del__(self) -> None:
            gone.append(self)

    gone: list[object] = []
    plans: PlanCache[int, Plan] = PlanCache(64)
    for key in range(1000):
        before = len(gone)
        plans.keep(key, Plan())
        assert len(gone) - before <= 2
        assert key + 1 - len(gone) <= 64 + 32, "half as many again as are found, at most"
    plans.clear()
    assert len(gone) == 1000


class _Key:
    """Hashed in Python, and so slowly that another thread comes in between."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        time.sleep(1e-4)
        return self.number


def test_threads_that_keep_plans_stay_below_the_limit() -> None:
    plans: PlanCache[_Key, int] = PlanCache(4)

    def keep(thread: int) -> int:
        for number in range(50):
            plans.keep(_Key(100 * thread + number), number)
            assert len(plans) <= 4
        return thread

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(keep, range(4))) == [0, 1, 2, 3]
    assert 2 <= len(plans) <= 4


def test_a_look_up_takes_no_lock() -> None:
    plans: PlanCache[int, str] = PlanCache(2)
    plans.keep(1, "one")
    with plans._lock:  # a look-up that wanted it would wait for good
        assert plans.get(1) == "one"
        assert plans.get(2) is None
