"""Launches of the kernels that take one block of parameters: column_sum.cu, rows.cu and row_sums.cu."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..dispatch.plan_cache import PlanCache
from ..operations.problem import Operands, Problem
from ..tensors.execution import Execution
from ..tensors.view import TensorView

__all__ = ["BlockPlan", "BlockRun", "launch", "launch_block"]

_P = TypeVar("_P", bound=Problem)

_POINTER = struct.Struct("<Q")
_PLANS = 256  # numbers of rows of one layout, kept at most


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Everything about a launch but its pointers and its stream. further: (function, grid, threads) of the launches
    behind it, of the same block. scratch_bytes: of memory whose pointer follows the parameters."""

    problem: Problem
    function: int  # CUfunction
    grid: int
    threads: int
    shared_bytes: int
    params: bytes  # after the pointers
    further: tuple[tuple[int, int, int], ...] = ()
    scratch_bytes: int = 0


class BlockRun(Generic[_P]):
    """`backend.Run` of a kernel file: what launches one layout, by a plan that is made once for a number of rows.

    plan_for: (problem, stream) -> a new plan. It compiles and loads the kernel, on the device, which is current then.
    head:     (operands, out) -> the block's pointers.
    """

    __slots__ = ("_head", "_plan_for", "_problem", "plans")

    def __init__(
        self, problem: _P, plan_for: Callable[[_P, int], BlockPlan], head: Callable[[Operands, TensorView], bytes]
    ) -> None:
        self._problem, self._plan_for, self._head = problem, plan_for, head
        self.plans: PlanCache[int, BlockPlan] = PlanCache(_PLANS)

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue it. Raises DeviceError where the device or its driver reports a fault, BuildError where the kernel
        does not compile."""
        from .current import on_device

        plan = self.plans.get(m) or self.plans.recall(m)
        if plan is None:
            problem = self._problem.with_rows(m)
            plan = self.plans.keep(m, on_device(problem, self._plan_for, problem, execution.stream))
        on_device(plan.problem, _enqueue, plan, self._head(operands, out), execution)


def launch(problem: Problem, plan_for: Callable[[], BlockPlan], head: bytes, execution: Execution) -> None:
    """Launch a plan that is made for this once, such as one of a tile that the tables do not choose."""
    from .current import on_device

    on_device(problem, _enqueue, on_device(problem, plan_for), head, execution)


def _enqueue(plan: BlockPlan, pointers: bytes, execution: Execution) -> None:
    from .current import scratch_memory

    block = pointers + plan.params
    if plan.scratch_bytes:
        scratch = scratch_memory(execution, plan.scratch_bytes)  # held until all is enqueued
        block += _POINTER.pack(scratch.pointer)
    launch_block(plan.function, plan.grid, plan.threads, plan.shared_bytes, block, execution.stream)
    for function, grid, threads in plan.further:
        launch_block(function, grid, threads, 0, block, execution.stream)


def launch_block(function: int, grid: int, threads: int, shared_bytes: int, block: bytes, stream: int) -> None:
    """Enqueue a kernel (a CUfunction) that takes one block of parameters, on the device that is current."""
    from cupy.cuda import driver

    # A char* to the block: the address of that pointer is the array of one parameter that the driver wants, and the
    # driver copies the block before it returns.
    parameters = ctypes.c_char_p(block)
    driver.launchKernel(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(parameters), 0)
