"""batch_invariant_mode as a decorator: functions, methods, generators, coroutines, threads and torch.compile."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits

import detkern
from detkern.errors import ArgumentError, ContractUnsupported
from detkern.torch import batch_invariant_mode

torch.manual_seed(0)
A, B = torch.randn(9, 70).bfloat16(), torch.randn(70, 12).bfloat16()
OURS = detkern.gemm(A, B, contract="tree")  # whose bits PyTorch's product has not
PLAIN = A @ B


@batch_invariant_mode(contract="tree", strict=True)
def product(a: Any, b: Any = B) -> Any:
    """a @ b."""
    return a @ b


def _off() -> bool:
    return bool(torch._C._len_torch_function_stack() == 0 and same_bits(A @ B, PLAIN))


def test_each_call_runs_in_the_mode_and_nothing_is_left() -> None:
    assert not same_bits(OURS, PLAIN)
    assert (product.__name__, product.__doc__) == ("product", "a @ b.")
    assert list(inspect.signature(product).parameters) == ["a", "b"]
    for _ in range(2):
        assert same_bits(product(A), OURS)
        assert _off()
    with pytest.raises(ContractUnsupported, match="float64"):
        product(A.double(), b=B.double())
    assert _off()


def test_recursive_calls_and_modes_around() -> None:
    @batch_invariant_mode(contract="tree")
    def power(depth: int) -> list[Any]:
        return [A @ B, *(power(depth - 1) if depth else []), A @ B]

    assert all(same_bits(x, OURS) for x in power(3))
    assert _off()
    with batch_invariant_mode(contract="fma"):
        assert same_bits(product(A), OURS)
        assert same_bits(A @ B, detkern.gemm(A, B, contract="fma"))
    mode = batch_invariant_mode(contract="tree")
    with mode:
        assert same_bits(mode(lambda: A @ B)(), OURS)
        assert same_bits(A @ B, OURS)
    assert _off()


def test_methods_partials_and_modules() -> None:
    class Layer(torch.nn.Module):
        @batch_invariant_mode(contract="tree")
        def forward(self, x: Any) -> Any:
            return x @ B

        @staticmethod
        @batch_invariant_mode(contract="tree")
        def fixed() -> Any:
            return A @ B

    mode = batch_invariant_mode(contract="tree")
    assert same_bits(Layer()(A), OURS)
    assert same_bits(Layer.fixed(), OURS)
    assert same_bits(mode(functools.partial(torch.matmul, other=B))(A), OURS)
    assert same_bits(mode(torch.nn.Sequential(Layer()))(A), OURS)
    assert _off()


def test_each_thread_has_the_mode_during_its_own_calls_alone() -> None:
    inside, outside = threading.Event(), threading.Event()
    seen: list[Any] = []

    @batch_invariant_mode(contract="tree")
    def held() -> None:
        inside.set()
        outside.wait(30)
        seen.append(A @ B)

    thread = threading.Thread(target=held)
    thread.start()
    inside.wait(30)
    assert _off()
    assert same_bits(product(A), OURS)
    outside.set()
    thread.join()
    assert same_bits(seen[0], OURS)
    many: list[Any] = []
    threads = [threading.Thread(target=lambda: many.append(product(A))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(many) == 4
    assert all(same_bits(x, OURS) for x in many)


def test_a_generator_has_the_mode_while_it_runs_and_its_caller_has_not() -> None:
    closed: list[Any] = []

    @batch_invariant_mode(contract="tree")
    def steps(count: int) -> Iterator[Any]:
        try:
            for _ in range(count):
                try:
                    sent = yield A @ B
                except KeyError:
                    sent = "caught"
                if sent is not None:
                    yield sent, A @ B
        finally:
            closed.append(A @ B)
        return A @ B

    assert inspect.isgeneratorfunction(steps)
    for x in steps(2):
        assert same_bits(x, OURS)
        assert _off()
    both = [steps(2), steps(2)]
    for pair in zip(*both, strict=True):
        assert all(same_bits(x, OURS) for x in pair)
    running = steps(3)
    next(running)
    assert running.send(5)[0] == 5
    next(running)
    assert running.throw(KeyError())[0] == "caught"
    assert _off()
    running.close()
    assert len(closed) == 4
    assert all(same_bits(x, OURS) for x in closed)
    whole = steps(0)
    with pytest.raises(StopIteration) as end:
        next(whole)
    assert same_bits(end.value.value, OURS)

    @batch_invariant_mode(contract="tree")
    def failing() -> Iterator[Any]:
        yield 1
        raise RuntimeError("its own")

    broken = failing()
    next(broken)
    with pytest.raises(RuntimeError, match="its own"):
        next(broken)
    assert _off()


def test_a_coroutine_has_the_mode_while_it_runs_and_other_tasks_have_not() -> None:
    async def inner() -> Any:
        await asyncio.sleep(0)
        return A @ B

    @batch_invariant_mode(contract="tree")
    async def covered() -> list[Any]:
        found = [A @ B]
        await asyncio.sleep(0)
        found += [A @ B, await inner()]
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(30)
        except TimeoutError:
            found.append(A @ B)
        return found

    class Called:
        async def __call__(self) -> list[Any]:
            return [await inner()] * 4

    async def bare() -> list[Any]:
        found = []
        for _ in range(5):
            found.append(A @ B)
            await asyncio.sleep(0)
        return found

    async def everything() -> Any:
        return await asyncio.gather(covered(), bare(), called())

    called = batch_invariant_mode(contract="tree")(Called())
    assert inspect.iscoroutinefunction(covered)
    first, plain, second = asyncio.run(everything())
    assert len(first) == len(second) == 4
    assert all(same_bits(x, OURS) for x in (*first, *second))
    assert all(same_bits(x, PLAIN) for x in plain)
    assert _off()


def test_what_it_cannot_decorate_is_refused() -> None:
    async def stream() -> AsyncIterator[Any]:
        yield A @ B

    mode = batch_invariant_mode()
    with pytest.raises(ArgumentError, match=r"async generator .*stream"):
        mode(stream)
    for wrong in (torch.nn.Linear, 3, classmethod(lambda cls: None)):
        with pytest.raises(ArgumentError, match="decorates functions"):
            mode(wrong)


def test_gradients_and_torch_compile() -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    dy = torch.randn(9, 12).bfloat16()
    wanted = [detkern.gemm_da(dy, B, contract="tree"), detkern.gemm_db(A, dy, contract="tree")]
    torch._dynamo.reset()
    for function in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        y = function(a, b)
        assert same_bits(y.detach(), OURS)
        for got, right in zip(torch.autograd.grad(y, (a, b), dy), wanted, strict=True):
            assert same_bits(got, right)
    assert _off()
