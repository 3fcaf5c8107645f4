"""Launches of the kernels that take one block of parameters and no scratch memory: column_sum.cu and rows.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.rows.problem import RowProblem
from ..plan_cache import PlanCache

__all__ = ["BlockLauncher", "BlockPlan"]

_P = TypeVar("_P", ColumnSumProblem, RowProblem)
_L = TypeVar("_L")

_PLANS = 1024  # of a kernel file, kept at most


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Everything about a launch but its pointers and its stream."""

    function: int  # CUfunction
    grid: int
    threads: int
    shared_bytes: int
    params: bytes  # after the pointers


class BlockLauncher(Generic[_P, _L]):
    """What launches the problems of one kernel file, each by a plan that is made once.

    plan_for: (problem, stream, launch or None for the problem's own) -> a new plan. It compiles and loads the kernel, on the
    device, which is current then.
    """

    def __init__(self, plan_for: Callable[[_P, int, _L | None], BlockPlan]) -> None:
        self._plan_for: Callable[[_P, int, _L | None], BlockPlan] = plan_for
        self.plans: PlanCache[_P, BlockPlan] = PlanCache(_PLANS)

    def __call__(self, problem: _P, pointers: bytes, stream: int, chosen: _L | None) -> None:
        """Enqueue it. pointers: the block's head. Raises DeviceError where the device or its driver reports a fault, BuildError
        where the kernel does not compile."""
        from .current import on_device

        plan = self.plans.get(problem) if chosen is None else None
        if plan is None:
            plan = on_device(problem, self._plan_for, problem, stream, chosen)
            if chosen is None:
                self.plans.keep(problem, plan)
        on_device(problem, _enqueue, plan, pointers, stream)


def _enqueue(plan: BlockPlan, pointers: bytes, stream: int) -> None:
    from cupy.cuda import driver

    # A char* to the block: the address of that pointer is the array of one parameter that the driver wants, and the driver
    # copies the block before it returns.
    block = ctypes.c_char_p(pointers + plan.params)
    driver.launchKernel(
        plan.function, plan.grid, 1, 1, plan.threads, 1, 1, plan.shared_bytes, stream, ctypes.addressof(block), 0
    )
