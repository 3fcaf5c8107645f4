"""Which plans are made and kept, and the block that reaches the driver."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy.cuda import driver, runtime

from detkern.cu import current
from detkern.cu.block_launch import BlockPlan, BlockRun, launch
from detkern.dispatch.backend import Execution
from detkern.errors import BuildError
from detkern.operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from detkern.operations.problem import Operands
from detkern.tensors import Device, TensorView
from detkern.vocabulary.dtypes import F32


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(function, sizes, stream, block) of each launch."""
    calls: list[tuple[Any, ...]] = []

    def launch(function: int, *given: Any) -> None:
        *sizes, stream, parameters, extra = given
        assert extra == 0
        calls.append((function, tuple(sizes), stream, ctypes.c_char_p.from_address(parameters).value))

    monkeypatch.setattr(driver, "launchKernel", launch)
    monkeypatch.setattr(driver, "ctxGetCurrent", lambda: 1)
    monkeypatch.setattr(runtime, "getDevice", lambda: 1)
    return calls


DEVICE = Device("cuda", 1)


def _none(size: int) -> TensorView:
    raise AssertionError("no scratch is needed")


def _problem(n: int) -> ColumnSumProblem:
    return column_sum_problem(
        TensorView(4096, (3, n), (n, 1), F32, DEVICE), TensorView(512, (n,), (1,), F32, DEVICE), False
    )


def _head(operands: Operands, out: TensorView) -> bytes:
    assert operands[0] is not None
    return b"%d-%d" % (operands[0].pointer, out.pointer)


def _run(made: list[tuple[int, int]]) -> BlockRun[ColumnSumProblem]:
    def plan_for(problem: ColumnSumProblem, stream: int) -> BlockPlan:
        made.append((problem.m, stream))
        return BlockPlan(problem, 70 + problem.m, 4, 160, 99, b"own")

    return BlockRun(_problem(7), plan_for, _head)


def _view(pointer: int) -> TensorView:
    return TensorView(pointer, (3, 7), (7, 1), F32, DEVICE)


def test_a_plan_is_made_once_for_a_number_of_rows(launches: list[tuple[Any, ...]]) -> None:
    made: list[tuple[int, int]] = []
    run = _run(made)
    for m, stream in ((3, 9), (3, 10), (8, 9), (3, 9)):
        run(m, (_view(16),), _view(32), Execution(DEVICE, stream, _none))
    assert made == [(3, 9), (8, 9)]
    assert len(run.plans) == 2
    sizes = (4, 1, 1, 160, 1, 1, 99)
    assert launches == [
        (function, sizes, stream, b"16-32own") for function, stream in ((73, 9), (73, 10), (78, 9), (73, 9))
    ]


def test_a_launch_that_was_asked_for(launches: list[tuple[Any, ...]]) -> None:
    for chosen in (b"other", b"another"):
        launch(
            _problem(7),
            lambda chosen=chosen: BlockPlan(_problem(7), 70, 4, 160, 99, chosen),
            b"head",
            Execution(DEVICE, 9, _none),
        )
    assert [block for *_, block in launches] == [b"headother", b"headanother"]


def test_launches_behind_one_another_share_a_block_and_scratch(launches: list[tuple[Any, ...]]) -> None:
    def allocate(size: int) -> TensorView:
        assert size == 48
        return _view(0x1122334455667788)

    plan = BlockPlan(_problem(7), 70, 4, 160, 99, b"own", ((71, 5, 64), (72, 6, 32)), 48)
    launch(_problem(7), lambda: plan, b"head", Execution(DEVICE, 9, allocate))
    assert [(function, sizes) for function, sizes, *_ in launches] == [
        (70, (4, 1, 1, 160, 1, 1, 99)), (71, (5, 1, 1, 64, 1, 1, 0)), (72, (6, 1, 1, 32, 1, 1, 0))
    ]  # fmt: skip
    assert [block for *_, block in launches] == [b"headown" + (0x1122334455667788).to_bytes(8, "little")] * 3


def test_scratch_is_held_until_all_is_enqueued(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator without a pool frees what nobody holds, and gives the same memory to others."""

    class Memory:
        pass

    held: list[weakref.ref[Memory]] = []
    alive = []

    def allocate(size: int) -> TensorView:
        memory = Memory()
        held.append(weakref.ref(memory))
        return TensorView(64, (size,), (1,), F32, DEVICE, array=memory)

    monkeypatch.setattr(driver, "launchKernel", lambda *_: alive.append(held[0]() is not None))
    plan = BlockPlan(_problem(7), 70, 4, 160, 99, b"own", ((71, 5, 64),), 48)
    launch(_problem(7), lambda: plan, b"head", Execution(DEVICE, 9, allocate))
    assert alive == [True, True]
    assert held[0]() is None


@pytest.mark.parametrize("capturing", [False, True])
def test_scratch_that_a_captured_graph_refers_to_is_kept(
    capturing: bool, launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's pool would hand it to others while the graph may still be replayed."""

    class Memory(cupy.ndarray):
        pass

    nothing = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, device_id=0), 0)
    memory = Memory.__new__(Memory, (0,), memptr=nothing)
    view = TensorView(0x1122334455667788, (48,), (1,), F32, DEVICE, array=memory)
    monkeypatch.setattr(runtime, "streamIsCapturing", lambda stream: capturing)
    monkeypatch.setattr(current, "_captured", [])
    plan = BlockPlan(_problem(7), 70, 4, 160, 99, b"own", ((71, 5, 64),), 48)
    launch(_problem(7), lambda: plan, b"head", Execution(DEVICE, 9, lambda size: view))
    assert len(launches) == 2
    assert [kept is memory for kept in current._captured] == [True] * capturing


def test_a_kernel_that_does_not_compile_is_tried_again(launches: list[tuple[Any, ...]]) -> None:
    def refused(*_: Any) -> BlockPlan:
        raise BuildError("NVRTC refused it")

    run = BlockRun(_problem(7), refused, _head)
    for _ in range(2):
        with pytest.raises(BuildError):
            run(3, (_view(16),), _view(32), Execution(DEVICE, 9, _none))
    assert launches == []
    assert len(run.plans) == 0
