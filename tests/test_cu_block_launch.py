"""Which plans are made and kept, and the block that reaches the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy.cuda import driver, runtime

from detkern.cu.block_launch import BlockLauncher, BlockPlan
from detkern.dtypes import F32
from detkern.errors import BuildError
from detkern.operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from detkern.tensors import Device, TensorView


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


def _problem(n: int) -> ColumnSumProblem:
    device = Device("cuda", 1)
    return column_sum_problem(
        TensorView(4096, (3, n), (n, 1), F32, device), TensorView(512, (n,), (1,), F32, device), False
    )


def _launcher(made: list[tuple[int, int, str | None]]) -> BlockLauncher[ColumnSumProblem, str]:
    def plan_for(problem: ColumnSumProblem, stream: int, chosen: str | None) -> BlockPlan:
        made.append((problem.n, stream, chosen))
        return BlockPlan(70 + problem.n, 4, 160, 99, (chosen or "own").encode())

    return BlockLauncher(plan_for)


def test_a_plan_is_made_once_for_a_problem(launches: list[tuple[Any, ...]]) -> None:
    made: list[tuple[int, int, str | None]] = []
    launcher = _launcher(made)
    for n, stream in ((7, 9), (7, 10), (8, 9)):
        launcher(_problem(n), b"head", stream, None)
    assert made == [(7, 9, None), (8, 9, None)]
    sizes = (4, 1, 1, 160, 1, 1, 99)
    assert launches == [(77, sizes, 9, b"headown"), (77, sizes, 10, b"headown"), (78, sizes, 9, b"headown")]


def test_a_launch_that_was_asked_for_is_not_kept(launches: list[tuple[Any, ...]]) -> None:
    made: list[tuple[int, int, str | None]] = []
    launcher = _launcher(made)
    for chosen in (None, "other", None, "other"):
        launcher(_problem(7), b"", 9, chosen)
    assert [chosen for _, _, chosen in made] == [None, "other", "other"]
    assert [block for *_, block in launches] == [b"own", b"other", b"own", b"other"]


def test_a_kernel_that_does_not_compile_is_tried_again(launches: list[tuple[Any, ...]]) -> None:
    def refused(*_: Any) -> BlockPlan:
        raise BuildError("NVRTC refused it")

    launcher: BlockLauncher[ColumnSumProblem, str] = BlockLauncher(refused)
    for _ in range(2):
        with pytest.raises(BuildError):
            launcher(_problem(7), b"", 9, None)
    assert launches == []
    assert len(launcher.plans) == 0
