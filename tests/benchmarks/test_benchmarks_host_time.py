"""The host time of numbers of rows that were never seen, on a clock of the test's own."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import host_time, torch_linear


class Clock:
    """Time is what calls say they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.ns)

    def taking(self, us: Callable[[Any], float], seen: list[Any]) -> Callable[[Any], None]:
        def call(argument: Any) -> None:
            assert not gc.isenabled()
            seen.append(argument)
            self.ns += int(1000 * us(argument))

        return call


def test_every_size_comes_once_in_random_order_then_again_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    seen: list[int] = []
    waited: list[int] = []
    call = clock.taking(lambda m: 50.0, seen)
    first, again = host_time.measure("path", call, range(100), True, lambda: waited.append(len(seen)))
    assert sorted(seen[:100]) == sorted(seen[100:]) == list(range(100))
    assert seen[:100] != seen[100:]
    assert seen[:100] != sorted(seen[:100])
    assert waited == [0, 100, 100, 200]  # never in between
    assert gc.isenabled()
    assert (first["m"], first["calls"], first["p50_us"], first["max_us"]) == ("never seen", 100, 50.0, 50.0)
    assert first["met"]
    assert "met" not in again


def test_percentiles_and_what_was_loaded_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = host_time.spent(clock.taking(lambda m: 70_000.0 if m == 500 else 1.0 + m / 10, []), range(1000))
    assert times[499:502] == [50.9, 70_000.0, 51.1]
    found = host_time.row("path", "never seen", times, True)
    assert (found["p50_us"], found["p99_us"], found["max_us"], found["loads"]) == (50.9, 100.0, 70_000.0, 1)
    assert found["met"]


@pytest.mark.parametrize(("p50", "p99", "met"), [(60.0, 150.0, True), (60.1, 100.0, False), (50.0, 150.1, False)])
def test_both_targets_have_to_be_met(p50: float, p99: float, met: bool) -> None:
    assert host_time.row("path", "never seen", [p50] * 98 + [p99] * 2, True)["met"] is met
    assert "met" not in host_time.row("path", "again", [1.0], False)


def test_a_call_that_fails_leaves_the_collector_on() -> None:
    def failing(argument: Any) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        host_time.spent(failing, [1])
    assert gc.isenabled()


def test_without_a_gpu_it_says_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_time.timing, "missing", lambda: "there is no CUDA device")
    monkeypatch.setattr(sys, "argv", ["host_time", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        host_time.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "cannot run here: there is no CUDA device\n"
    assert list(tmp_path.iterdir()) == []


def test_the_sources_of_torch_linear_are_there() -> None:
    assert all(path.is_file() for path in torch_linear.sources())


def test_sources_are_what_a_call_goes_through() -> None:
    names = {str(path.relative_to(host_time.records.ROOT)) for path in host_time.sources()}
    assert {
        "detkern/api.py",
        "detkern/cu/geometry.py",
        "detkern/cu/launch.py",
        "detkern/dispatch/plan_cache.py",
        "detkern/operations/gemm/checks.py",
        "detkern/torch/functions/eager.py",
    } <= names
    assert all(path.is_file() for path in host_time.sources())
