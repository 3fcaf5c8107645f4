"""Where plans are kept: what was worked out once for calls of one layout, and is used by every later one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PlanCache"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class PlanCache(Generic[_K, _V]):
    """At most `limit` plans by their keys, for any number of threads. Where one more comes, those go that were not used
    for longest, half of `limit` at a time: a stream of keys that are used once does not drive out one that is used all
    along. What goes is found no more, and given back one by one, as others come: a hundred plans at once would take as
    long as ten calls.

    A look-up is `get(key) or recall(key)`: `get` finds what was used of late, and takes no lock.
    """

    __slots__ = ("_half", "_leaving", "_lock", "_old", "_young", "get")

    get: Callable[[_K], _V | None]

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._old: dict[_K, _V] = {}
            self._leaving: dict[_K, _V] = {}
            self._renew()

    def _renew(self) -> None:
        self._young: dict[_K, _V] = {}
        # The dict's own method, which every call looks up with: no lock is taken and no frame of Python made.
        self.get = self._young.get

    def recall(self, key: _K) -> _V | None:
        """A plan that `get` did not find, if it was used not long before: then `get` finds it again."""
        plan = self._old.get(key)
        return None if plan is None else self.keep(key, plan)

    def keep(self, key: _K, plan: _V) -> _V:
        """Keep a plan, and return it."""
        gone = None  # given back after the lock
        with self._lock:
            if key not in self._young:
                if len(self._young) >= self._half:
                    self._leaving, self._old = self._old, self._young
                    self._renew()
                if self._leaving:
                    gone = self._leaving.popitem()
            self._young[key] = plan
        del gone
        return plan

    def __len__(self) -> int:
        with self._lock:
            return len(self._young.keys() | self._old.keys())
