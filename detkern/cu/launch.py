"""From a problem to an enqueued kernel: the argument block, plans that are worked out once, the launch itself."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from cupy.cuda import driver

from ..dispatch.backend import Execution
from ..dispatch.plan_cache import PlanCache
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import batch_offsets
from ..operations.problem import Operands
from ..tensors import TensorView
from .current import on_device, scratch_memory
from .device import CudaDevice, describe
from .extended_launch import ExtendedLaunch
from .geometry import Launch, Maps, oriented
from .loader import load_function
from .tensor_map import folded
from .tile_choice import Chooser

__all__ = ["MAX_BATCH_RANK", "PARAMS_BYTES", "Launches", "Plan", "enqueue", "launch", "pack_params", "plan_for"]

MAX_BATCH_RANK = 8

# GemmParams of params.cuh: five pointers, then sizes, strides, codes and the batch, which a plan has packed.
_FIELDS = struct.Struct(f"<11q8i{4 * MAX_BATCH_RANK}q")
_BLOCK = struct.Struct(f"<5Q{_FIELDS.size}s")
PARAMS_BYTES = _BLOCK.size
# Where, in what is packed, m, n and prefetch_bytes are.
_SIZE = struct.Struct("<q")
_M, _N, _PREFETCH = 0, 8, 80

_PLANS = 256  # numbers of rows of one layout, kept at most; a plan is about 1 KiB


def pack_params(problem: GemmProblem, maps: Maps | None = None, prefetch_bytes: int = 0) -> bytes:
    """GemmParams after its pointers. Of more than MAX_BATCH_RANK batch dimensions, the last ones.

    maps, prefetch_bytes: a launch's.
    """
    shared = 1, 1
    if maps is not None:
        mapped = folded(problem)
        assert mapped is not None
        problem, shared = mapped.problem, mapped.shared
    rank = min(len(problem.batch), MAX_BATCH_RANK)
    padding = (0,) * (MAX_BATCH_RANK - rank)
    inner = slice(len(problem.batch) - rank, None)
    a, b, out, bias = problem.a, problem.b, problem.out, problem.bias
    return _FIELDS.pack(
        problem.m, problem.n, problem.k,
        a.row_stride, a.col_stride,
        b.row_stride, b.col_stride,
        out.row_stride, out.col_stride,
        0 if bias is None else bias.stride,
        prefetch_bytes,
        out.dtype.code,
        0 if bias is None else bias.dtype.code,
        int(problem.accumulate),
        rank,
        int(maps is not None and maps.out is not None),  # OutPath
        0 if maps is None else maps.whole_boxes,
        *shared,
        *problem.batch[inner], *(1 for _ in padding),
        *a.batch_strides[inner], *padding,
        *b.batch_strides[inner], *padding,
        *out.batch_strides[inner], *padding,
    )  # fmt: skip


@dataclass(slots=True)
class Plan:
    """Everything about a launch but its pointers and its stream. Kernel parameters come from `params`; `offsets` are
    what is added to a, b and out, in bytes, for each launch of a batch that has more dimensions than one launch takes.
    swapped: the kernel's a is the caller's b."""

    problem: GemmProblem
    function: int  # CUfunction
    launch: Launch
    params: bytes
    offsets: tuple[tuple[int, ...], ...]
    extended: ExtendedLaunch | None
    swapped: bool


class Layout:
    """What the plans of one layout, which differ in the number of rows, share."""

    __slots__ = ("_packed", "choose", "offsets")

    def __init__(self, problem: GemmProblem, device: CudaDevice) -> None:
        self.choose = Chooser(problem, device.capability, device.multiprocessors)
        outer = max(len(problem.batch) - MAX_BATCH_RANK, 0)
        self.offsets = batch_offsets(problem.batch[:outer], problem.a, problem.b, problem.out)
        self._packed: dict[tuple[int, int], tuple[Launch, bytes, bytes, bytes]] = {}

    def params(self, problem: GemmProblem, chosen: Launch) -> bytes:
        """`pack_params` of a problem of the layout. Of one kernel's only the rows and prefetch_bytes differ, and where
        there are few rows the boxes."""
        key = id(chosen.tile), 0 if chosen.maps is None else chosen.maps.whole_boxes
        kept = self._packed.get(key)
        if kept is None:
            block = pack_params(oriented(problem, chosen.tile), chosen.maps, chosen.prefetch_bytes)
            rows = _N if chosen.tile.swapped else _M
            # The launch, whose tile keeps its id then, and what is before, between and behind.
            self._packed[key] = chosen, block[:rows], block[rows + 8 : _PREFETCH], block[_PREFETCH + 8 :]
            return block
        _, before, between, behind = kept
        return before + _SIZE.pack(problem.m) + between + _SIZE.pack(chosen.prefetch_bytes) + behind


def plan_for(
    problem: GemmProblem, device: CudaDevice, stream: int, chosen: Launch | None = None, layout: Layout | None = None
) -> Plan:
    """A new plan. The kernel is compiled and loaded here, on the device, which must be current.

    chosen: a geometry to use instead of the one that the tile tables give. layout: the problem's.
    """
    if layout is None:
        layout = Layout(problem, device)
    if chosen is None:
        chosen = layout.choose(problem)
    kernel = load_function(device.index, device.capability, chosen.build, stream)
    extended = None if chosen.maps is None else ExtendedLaunch(kernel.ptr, chosen)
    params = layout.params(problem, chosen)
    return Plan(problem, kernel.ptr, chosen, params, layout.offsets, extended, chosen.tile.swapped)


def enqueue(
    plan: Plan, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None, execution: Execution
) -> None:
    """Launch a plan on the execution's stream, on the device that is current."""
    stream, geometry = execution.stream, plan.launch
    # Held until all is enqueued.
    scratch = scratch_memory(execution, geometry.scratch_bytes) if geometry.scratch_bytes else None
    if plan.swapped:
        a, b = b, a
    for a_offset, b_offset, out_offset in plan.offsets:
        params = _BLOCK.pack(
            a.pointer + a_offset,
            b.pointer + b_offset,
            out.pointer + out_offset,
            0 if bias is None else bias.pointer,
            0 if scratch is None else scratch.pointer,
            plan.params,
        )
        if plan.extended is not None:
            plan.extended(params, a.pointer, b.pointer, out.pointer, stream)
            continue
        # A char* to the block: the address of that pointer is the array of one parameter that the driver wants,
        # and the driver copies the block before it returns.
        block = ctypes.c_char_p(params)
        driver.launchKernel(
            plan.function, geometry.grid, 1, 1, geometry.threads, 1, 1, geometry.build.shared_bytes,
            stream, ctypes.addressof(block), 0,
        )  # fmt: skip


class Launches:
    """`backend.Run` of products: what launches one layout, by a plan that is made once for a number of rows, on which
    its tile may depend. Nothing waits for the device, nothing is read back."""

    __slots__ = ("_layout", "_problem", "plans")

    def __init__(self, problem: GemmProblem) -> None:
        self._problem = problem
        self._layout: Layout | None = None
        self.plans: PlanCache[int, Plan] = PlanCache(_PLANS)

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue the product. Raises DeviceError where the device or its driver reports a fault, BuildError where the
        kernel does not compile, before `out` is touched."""
        a, b, bias = operands
        assert a is not None
        assert b is not None
        plan = self.plans.get(m) or self.plans.recall(m)
        if plan is None:
            problem = self._problem.with_rows(m)
            on_device(problem, self._first, problem, a, b, out, bias, execution)
        else:
            on_device(plan.problem, enqueue, plan, a, b, out, bias, execution)

    def _first(
        self,
        problem: GemmProblem,
        a: TensorView,
        b: TensorView,
        out: TensorView,
        bias: TensorView | None,
        execution: Execution,
    ) -> None:
        """The call that makes the plan of a number of rows."""
        facts = describe(problem.device.index)
        layout = self._layout
        if layout is None:
            layout = self._layout = Layout(problem, facts)
        plan = self.plans.keep(problem.m, plan_for(problem, facts, execution.stream, None, layout))
        enqueue(plan, a, b, out, bias, execution)


def launch(
    problem: GemmProblem,
    a: TensorView,
    b: TensorView,
    out: TensorView,
    bias: TensorView | None,
    execution: Execution,
    chosen: Launch | None = None,
) -> None:
    """Enqueue the product once, by a launch of the caller's. Raises as `Launches`."""
    if problem.m == 0 or problem.n == 0 or 0 in problem.batch:
        return
    plan = on_device(problem, plan_for, problem, describe(problem.device.index), execution.stream, chosen)
    on_device(problem, enqueue, plan, a, b, out, bias, execution)
