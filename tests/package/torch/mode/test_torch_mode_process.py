"""The mode for a whole process: threads, backward passes, other modes around and inside."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits
from torch.overrides import TorchFunctionMode, _len_torch_function_stack

import detkern
import detkern.torch as dt
from detkern.errors import ArgumentError, ContractUnsupported

X = torch.randn(60, 700, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    start = threading.Thread.start
    yield
    dt.disable()
    assert threading.Thread.start is start
    assert not _len_torch_function_stack()


def contract_here() -> str | None:
    """Of mm, by its bits: the contract's name, None for PyTorch's own."""
    found = X @ X.t()
    with torch._C.DisableTorchFunction():
        for contract in ("mma16", "tree"):
            if same_bits(found, detkern.gemm(X, X, trans_b=True, contract=contract)):
                return contract
        assert torch.allclose(found, X.mm(X.t()))
    return None


def in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_the_thread_that_enables_it_and_those_it_starts_are_in_it() -> None:
    assert contract_here() is None
    assert not dt.is_enabled()
    dt.enable(contract="tree")
    assert dt.is_enabled()
    assert contract_here() == "tree"
    assert in_a_thread(contract_here) == "tree"
    assert in_a_thread(lambda: in_a_thread(contract_here)) == "tree"
    assert in_a_thread(dt.is_enabled)
    with ThreadPoolExecutor(2) as pool:
        assert {pool.submit(contract_here).result() for _ in range(6)} == {"tree"}
    dt.disable()
    assert not dt.is_enabled()
    assert contract_here() is None
    assert in_a_thread(contract_here) is None
    dt.disable()


def test_a_thread_that_overrides_run_is_in_it_and_keeps_no_cycle() -> None:
    class Own(threading.Thread):
        def run(self) -> None:
            self.found = contract_here()

    dt.enable(contract="mma16")
    thread = Own()
    thread.start()
    thread.join()
    assert thread.found == "mma16"
    assert "run" not in vars(thread)


def test_what_others_put_around_the_start_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def around(name: str) -> None:
        inner = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda self: (starts.append(name), inner(self))[1])

    around("before")
    dt.enable(contract="tree")
    around("after")
    assert in_a_thread(contract_here) == "tree"
    dt.disable()
    assert in_a_thread(contract_here) is None
    dt.enable(contract="mma16")
    assert in_a_thread(contract_here) == "mma16"
    assert starts == ["after", "before"] * 3
    dt.disable()
    monkeypatch.undo()


def test_disable_ends_it_in_threads_that_go_on_and_a_later_enable_does_not_revive_it_there() -> None:
    turn, found = threading.Barrier(2), []

    def run() -> None:
        for _ in range(3):
            found.append((contract_here(), dt.is_enabled()))
            turn.wait()
            turn.wait()
        dt.enable(contract="mma16")
        found.append((contract_here(), dt.is_enabled()))

    dt.enable(contract="tree")
    thread = threading.Thread(target=run)
    thread.start()
    turn.wait()
    dt.disable()
    turn.wait()
    turn.wait()
    dt.enable(contract="mma16")
    turn.wait()
    turn.wait()
    turn.wait()
    thread.join()
    assert found == [("tree", True), (None, False), (None, False), ("mma16", True)]


def test_a_thread_that_ran_before_joins_by_a_call_of_its_own() -> None:
    ready, go, found = threading.Event(), threading.Event(), []

    def run() -> None:
        ready.set()
        go.wait()
        found.append(contract_here())
        dt.enable(contract="tree")
        found.append(contract_here())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    dt.enable(contract="tree")
    go.set()
    thread.join()
    assert found == [None, "tree"]


def test_modes_in_with_blocks_nest_in_it_whichever_comes_first() -> None:
    dt.enable(contract="tree")
    with dt.batch_invariant_mode(contract="mma16"):
        assert contract_here() == "mma16"
        assert dt.is_enabled()
    assert contract_here() == "tree"
    dt.disable()
    with dt.batch_invariant_mode(contract="mma16"):
        dt.enable(contract="tree")
        assert contract_here() == "mma16"
    assert contract_here() == "tree"
    with dt.batch_invariant_mode(contract="mma16"):
        dt.disable()
        assert contract_here() == "mma16"
        assert not dt.is_enabled()
    assert contract_here() is None


def test_modes_of_others_stay_where_they_are() -> None:
    class Counting(TorchFunctionMode):  # type: ignore[misc]
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        dt.enable(contract="tree")
        before = counting.calls
        X @ X.t()
        assert counting.calls == before + 2  # the product and the transposition
        dt.disable()
        X @ X.t()
        assert counting.calls == before + 4


def test_backward_passes_follow_it_and_what_runs_inside_of_them_is_in_it() -> None:
    inside: list[Any] = []
    leaf = X.clone().requires_grad_()

    def run() -> Any:
        y = torch.utils.checkpoint.checkpoint(lambda a: (a @ a.t()).softmax(-1), leaf, use_reentrant=False)
        y.register_hook(lambda _: inside.append(contract_here()))
        return torch.autograd.grad(y[:, 0].sum(), leaf)[0]

    with dt.batch_invariant_mode(contract="tree", strict=True):
        expected = run()
    dt.enable(contract="tree", strict=True)
    assert same_bits(run(), expected)
    assert same_bits(in_a_thread(run), expected)
    assert inside == ["tree"] * 3


def test_settings_are_those_of_the_mode_and_do_not_change_while_it_is_on() -> None:
    with pytest.raises(ArgumentError, match="device_types"):
        dt.enable(device_types="tpu")
    assert not dt.is_enabled()
    dt.enable(strict=True)
    dt.enable(strict=True)
    with pytest.raises(ContractUnsupported, match="float64"):
        X.double() @ X.double().t()
    with pytest.raises(ArgumentError, match=r"disable\(\) first"):
        dt.enable()
    assert dt.is_enabled()


def test_the_order_of_device_types_is_no_setting() -> None:
    try:
        dt.enable(device_types=("cuda", "cpu"))
        dt.enable(device_types=["cpu", "cuda", "cpu"])
    finally:
        dt.disable()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"strict": "no"}, "strict='no' must be True or False"), ({"contract": 3}, "contract=3 must be a contract's name"),
     ({"device_types": 3}, "device_types: 3 is none of cpu")],
)  # fmt: skip
def test_settings_that_are_none_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        dt.enable(**settings)
    assert not dt.is_enabled()


def test_a_process_may_end_with_it_on() -> None:
    source = """
import threading, torch, detkern.torch as dt
dt.enable(strict=True)
x = torch.randn(4, 4)
threading.Thread(target=lambda: x @ x).start()
computed, held = threading.Event(), threading.Event()
threading.Thread(target=lambda: (x @ x, computed.set(), held.wait()), daemon=True).start()
computed.wait()  # a thread that is stopped in the middle of C++ ends the process, with the mode or without
print((x @ x).shape)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([4, 4])" in done.stdout
