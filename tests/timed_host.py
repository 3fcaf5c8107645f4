"""A device for the benchmarks' timing that needs no GPU: calls run on the CPU, and time is what they say they take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from detkern.measure import peers, timing


class Graph:
    def __init__(self, calls: timing.Calls) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


class Host:
    """timing.Device on the CPU: calls run when they are replayed, time is what they add to `now`."""

    name = "cpu"
    cache_bytes = 4096

    def __init__(self) -> None:
        self.now = 0.0
        self.graphs: list[int] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    def graph(self, calls: timing.Calls) -> Graph:
        self.graphs.append(len(calls))
        return Graph(calls)

    def mark(self) -> float:
        return self.now

    def between(self, first: float, second: float) -> float:
        return second - first

    def taking(self, us: float, call: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> None:
            self.now += us
            call()

        return timed


def peers_taking(host: Host, **us: float) -> list[peers.Peer]:
    """cuBLAS and detkern as they are, taking so many µs a call."""

    def bind(name: str, *arguments: Any) -> Callable[[], Any]:
        return host.taking(us[name], peers._PEERS[name].bind(*arguments))

    return [peers.Peer(name, functools.partial(bind, name)) for name in us]
