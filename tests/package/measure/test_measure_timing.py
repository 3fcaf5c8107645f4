"""Timing on a clock of its own: graphs, turns, the fastest of several; and what a measurement lacks."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from timed_host import Graph, Host

from detkern.measure import timing


def test_sets_pass_twice_the_cache() -> None:
    assert timing.sets(10, 100) == 20
    assert timing.sets(70, 100) == 3
    assert timing.sets(1000, 100) == 2


def test_a_graph_is_long_enough_and_rotates_evenly() -> None:
    for us, count, expected in ((1.0, 3, 63), (1.0, 70, 70), (50.0, 3, 21), (5000.0, 2, 2)):
        host = Host()
        called = [0] * count

        def call(index: int, called: list[int] = called) -> None:
            called[index] += 1

        calls = [host.taking(us, functools.partial(call, index)) for index in range(count)]
        captured = timing.capture(host, calls)
        assert captured.calls == expected
        called[:] = [0] * count
        captured.graph.replay()
        assert called == [expected // count] * count


def test_peers_take_turns() -> None:
    """Equal times whatever the machine does from turn to turn, and another peer first in each turn."""
    host = Host()
    order: list[str] = []

    def call(name: str, us: float) -> Callable[[], Any]:
        def timed() -> None:
            slower = 2.0 if len(order) > 200 else 1.0  # the clock falls: both are slowed alike in one turn
            order.append(name)
            host.now += us * slower

        return timed

    captured = {
        "a": timing.Captured(Graph([call("a", 400.0)] * 2), 2),
        "b": timing.Captured(Graph([call("b", 3000.0)]), 1),
    }
    found = timing.interleave(host, captured, turns=4, warm=1)
    assert found == {"a": [400.0] * 4, "b": [3000.0] * 4}
    # The first replays say how many make a turn: 3 of 800 µs, 1 of 3000.
    assert "".join(order) == "aa" + "b" + "aaaaaab" + "baaaaaa" + "aaaaaab" + "baaaaaa" + "aaaaaab"


def test_a_pytorch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from detkern.cu import device

    torch = types.SimpleNamespace(__version__="2.13.0+cpu", cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(device, "missing", lambda index: None)
    assert timing.missing() == "PyTorch 2.13.0+cpu shows no CUDA device"
    torch.cuda.is_available = lambda: True
    assert timing.missing() is None


def test_the_fastest_of_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()

    def taking(us: float) -> list[Any]:
        return [host.taking(us, lambda: None)] * 2

    def failing() -> None:
        raise RuntimeError("not this one")

    assert timing.fastest(host, [taking(30.0), [failing], taking(10.0), taking(20.0)]) == 2
    assert timing.fastest(host, [[failing], taking(10.0)]) == 1
    with pytest.raises(RuntimeError, match="not this one"):
        timing.fastest(host, [[failing]])
    with pytest.raises(ValueError, match="nothing"):
        timing.fastest(host, [])
    assert timing.rough(host, timing.Captured(Graph(taking(10.0)), 2)) == 10.0
    # Of the three that are roughly fastest the times in turn decide.
    seen = iter((3.0, 1.0, 2.0, 4.0))
    monkeypatch.setattr(timing, "rough", lambda device, captured: next(seen))
    assert timing.fastest(host, [taking(20.0), taking(40.0), taking(30.0), taking(10.0)]) == 0
