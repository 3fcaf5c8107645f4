"""What is kept, what goes, and that a look-up waits for nobody."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from detkern.plan_cache import PlanCache


def test_a_plan_is_found_by_an_equal_problem() -> None:
    plans: PlanCache[tuple[int, ...], list[int]] = PlanCache(4)
    assert plans.get((1, 2)) is None
    plan = [7]
    assert plans.keep((1, 2), plan) is plan
    assert plans.get((1, 2)) is plan
    assert len(plans) == 1


def test_the_oldest_plan_goes_however_often_it_was_used() -> None:
    plans: PlanCache[int, str] = PlanCache(3)
    for problem in range(3):
        plans.keep(problem, str(problem))
    assert plans.get(0) == "0"
    plans.keep(3, "3")
    assert [plans.get(problem) for problem in range(4)] == [None, "1", "2", "3"]
    assert len(plans) == 3


class _Problem:
    """Hashed in Python, as problems are, and so slowly that another thread comes in between."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        time.sleep(1e-4)
        return self.number


def test_threads_that_keep_plans_stay_below_the_limit() -> None:
    plans: PlanCache[_Problem, int] = PlanCache(4)

    def keep(thread: int) -> int:
        for number in range(50):
            plans.keep(_Problem(100 * thread + number), number)
            assert len(plans) <= 4
        return thread

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(keep, range(4))) == [0, 1, 2, 3]
    assert len(plans) == 4


def test_a_look_up_takes_no_lock() -> None:
    plans: PlanCache[int, str] = PlanCache(2)
    plans.keep(1, "one")
    with plans._lock:  # a look-up that wanted it would wait for good
        assert plans.get(1) == "one"
        assert plans.get(2) is None
