"""Which modes a thread is in: the dispatcher's keys, what suspends them, and nothing left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits

import detkern
import detkern.torch as dt
from detkern.torch.mode import entered

_generator = torch.Generator().manual_seed(0)
A = torch.randn(60, 700, generator=_generator).bfloat16()
B = A.t()
OURS = detkern.gemm(A, B)
_is_included, _is_excluded = (
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C._dispatch_tls_is_dispatch_key_excluded,
)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    dt.disable()
    assert entered.current() is None
    for key in (entered.KEY, entered.RECORDING):
        assert not _is_included(key)
        assert not _is_excluded(key)
    assert not torch._C._len_torch_function_stack()


def on() -> bool:
    return same_bits(A @ B, OURS)


def beside(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_pytorch_holds_a_reference_to_what_a_thread_is_in() -> None:
    """Not every version takes one by itself: the object would be freed while the mode is on."""
    with dt.batch_invariant_mode():
        now = entered.current()
        assert sys.getrefcount(now) == 3  # `now`, the argument, PyTorch's
    assert sys.getrefcount(now) == 2


def test_enabled_here_and_disabled_elsewhere_leaves_nothing_however_often() -> None:
    for _ in range(2000):
        dt.enable()
        beside(dt.disable)
    assert len(entered.modes()) <= 1
    assert not on()
    assert entered.current() is None
    dt.enable()
    assert on()


def test_an_error_inside_of_an_op_leaves_the_mode_as_it_was() -> None:
    with dt.batch_invariant_mode(strict=True):
        for call in (lambda: A.double() @ B.double(), lambda: A @ A, lambda: A.sum(7)):
            for _ in range(2):
                with pytest.raises((RuntimeError, IndexError, NotImplementedError)):
                    call()
            assert on()
            assert not _is_excluded(entered.KEY)


def test_disable_takes_what_enable_gave_and_a_block_ends_by_itself() -> None:
    mode = dt.batch_invariant_mode()
    mode.enable()
    with mode:
        mode.disable()
        assert on()
    assert not on()
    with dt.batch_invariant_mode(contract="mma16") as outer:
        with mode:
            mode.disable()
        assert entered.modes() == (outer,)


def test_modes_follow_a_backward_pass_and_their_settings_with_them() -> None:
    x, seen = A.clone().requires_grad_(), []
    y = x.exp()
    y.register_hook(lambda _: seen.append((on(), entered.modes())))
    with dt.batch_invariant_mode(contract="mma16") as mode:
        y.sum().backward()
    assert seen == [(True, (mode,))]


def test_compiled_code_suspends_the_mode_and_gives_it_back() -> None:
    compiled = torch.compile(lambda a, b: (a @ b).sin(), backend="eager")

    @torch._dynamo.disable
    def skipped() -> bool:
        return on()

    broken = torch.compile(lambda a, b: ((a @ b).sin(), skipped()), backend="eager")
    plain = compiled(A, B)
    for enter in (dt.batch_invariant_mode, lambda: dt.batch_invariant_mode(strict=True)):
        with enter() as mode:
            for _ in range(2):
                assert same_bits(compiled(A, B), OURS.sin())
                assert _is_included(entered.KEY)
                assert on()
                y, inside = broken(A, B)
                assert same_bits(y, OURS.sin())
                assert inside
                with pytest.raises(RuntimeError):
                    compiled(A, A)
                assert _is_included(entered.KEY)
            with torch.device("cpu"), dt.batch_invariant_mode(contract="mma16") as inner:
                assert same_bits(compiled(A, B), OURS.sin())
                assert entered.modes() == (inner, mode)
            assert torch._C._len_torch_function_stack() == 0
    assert same_bits(compiled(A, B), plain)


def test_compiled_code_of_another_thread_suspends_nothing_here() -> None:
    compiling, done = threading.Event(), threading.Event()

    def backend(module: Any, inputs: Any) -> Any:
        compiling.set()
        done.wait()
        return module.forward

    thread = threading.Thread(target=lambda: torch.compile(lambda a: a.sin(), backend=backend)(A))
    with dt.batch_invariant_mode():
        thread.start()
        compiling.wait()
        try:
            assert _is_included(entered.KEY)
            assert on()
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_detkerns_ops(strict: bool) -> None:
    layer = torch.nn.Linear(700, 12).bfloat16()
    with dt.batch_invariant_mode():
        program = torch.export.export(layer, (A,), strict=strict)
        assert _is_included(entered.KEY)
        wanted = layer(A)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called == {"detkern.linear.default"}
    assert same_bits(program.module()(A), wanted)


def test_operators_that_take_functions_work_inside() -> None:
    with dt.batch_invariant_mode():
        y = torch.cond(torch.tensor(True), lambda a: a.sin(), lambda a: a.cos(), (A,))
        assert _is_included(entered.KEY)
    assert torch.equal(y, A.sin())


@pytest.mark.gpu
def test_modes_follow_a_backward_pass_into_the_threads_of_the_engine() -> None:
    x, seen = A.cuda().requires_grad_(), []
    ours = detkern.gemm(x.detach(), B.cuda())
    y = x.exp()
    y.register_hook(lambda _: seen.append((same_bits(x.detach() @ B.cuda(), ours), entered.modes())))
    with dt.batch_invariant_mode() as mode:
        y.sum().backward()
    assert seen == [(True, (mode,))]
