"""Where a backend keeps its launch plans: what was worked out for one problem, and is used by every later call of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PlanCache"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class PlanCache(Generic[_K, _V]):
    """At most `limit` plans by their problems; where one more comes, the oldest goes. For any number of threads."""

    __slots__ = ("_limit", "_lock", "_plans", "get")

    get: Callable[[_K], _V | None]

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._plans: dict[_K, _V] = {}
        self._lock = threading.Lock()
        # The dict's own method, which every launch calls: no lock is taken and no frame of Python made.
        self.get = self._plans.get

    def keep(self, problem: _K, plan: _V) -> _V:
        """Keep a plan, and return it."""
        with self._lock:
            while len(self._plans) >= self._limit:
                del self._plans[next(iter(self._plans))]
            self._plans[problem] = plan
        return plan

    def __len__(self) -> int:
        return len(self._plans)
