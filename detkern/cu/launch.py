"""From a problem to an enqueued kernel: the argument block, plans that are worked out once, the launch itself."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..backend import Execution
from ..contracts import Contract
from ..dtypes import E4M3, F32, DType, from_numpy
from ..errors import ArgumentError, DeviceError
from ..plan_cache import PlanCache
from ..problem import GemmProblem, batch_offsets, gemm_problem
from ..tensors import Device, TensorView
from .device import CudaDevice, describe
from .extended_launch import ExtendedLaunch, LaunchFailure
from .geometry import Launch, choose
from .loader import load_function

__all__ = ["MAX_BATCH_RANK", "PARAMS_BYTES", "Plan", "enqueue", "launch", "pack_params", "plan_for", "product"]

MAX_BATCH_RANK = 8

# GemmParams of params.cuh: five pointers, then sizes, strides, codes and the batch.
_POINTERS = struct.Struct("<5Q")
_FIELDS = struct.Struct(f"<10q6i{4 * MAX_BATCH_RANK}q")
PARAMS_BYTES = _POINTERS.size + _FIELDS.size

_PLANS = 4096  # kept at most; a plan is about 1 KiB


def pack_params(problem: GemmProblem, out_by_tma: bool = False) -> bytes:
    """GemmParams after its pointers. Of more than MAX_BATCH_RANK batch dimensions, the last ones."""
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
        out.dtype.code,
        0 if bias is None else bias.dtype.code,
        int(problem.accumulate),
        rank,
        int(out_by_tma), 0,
        *problem.batch[inner], *padding,
        *a.batch_strides[inner], *padding,
        *b.batch_strides[inner], *padding,
        *out.batch_strides[inner], *padding,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a launch but its pointers and its stream. Kernel parameters come from `params`; `offsets` are what
    is added to a, b and out, in bytes, for each launch of a batch that has more dimensions than one launch takes."""

    function: int  # CUfunction
    launch: Launch
    params: bytes
    offsets: tuple[tuple[int, ...], ...]
    extended: ExtendedLaunch | None


_plans: PlanCache[GemmProblem, Plan] = PlanCache(_PLANS)
# Scratch memory that captured graphs refer to. CuPy's pool would hand it to others while a graph may still be replayed
# (PyTorch gives each graph a pool of its own); nothing tells when a graph is gone, so it stays for good.
_captured: list[Any] = []


def plan_for(problem: GemmProblem, device: CudaDevice, stream: int, chosen: Launch | None = None) -> Plan:
    """A new plan. The kernel is compiled and loaded here, on the device, which must be current.

    chosen: a geometry to use instead of the one that the tile tables give.
    """
    if chosen is None:
        chosen = choose(problem, device.capability, device.multiprocessors)
    kernel = load_function(device.index, device.capability, chosen.build, stream)
    outer = max(len(problem.batch) - MAX_BATCH_RANK, 0)
    offsets = batch_offsets(problem.batch[:outer], problem.a, problem.b, problem.out)
    extended = None if chosen.maps is None else ExtendedLaunch(kernel.ptr, chosen)
    return Plan(
        kernel.ptr,
        chosen,
        pack_params(problem, chosen.maps is not None and chosen.maps.out is not None),
        offsets,
        extended,
    )


def _plan(problem: GemmProblem, stream: int) -> Plan:
    return _plans.get(problem) or _plans.keep(problem, plan_for(problem, describe(problem.device.index), stream))


def enqueue(
    plan: Plan, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None, execution: Execution
) -> None:
    """Launch a plan on the execution's stream, on the device that is current."""
    stream = execution.stream
    geometry = plan.launch
    scratch = execution.allocate(geometry.scratch_bytes) if geometry.scratch_bytes else None
    if scratch is not None and isinstance(scratch.array, cupy.ndarray) and runtime.streamIsCapturing(stream):
        _captured.append(scratch.array)
    for a_offset, b_offset, out_offset in plan.offsets:
        pointers = _POINTERS.pack(
            a.pointer + a_offset,
            b.pointer + b_offset,
            out.pointer + out_offset,
            0 if bias is None else bias.pointer,
            0 if scratch is None else scratch.pointer,
        )
        if plan.extended is not None:
            plan.extended(pointers + plan.params, a.pointer, b.pointer, out.pointer, stream)
            continue
        # A char* to the block: the address of that pointer is the array of one parameter that the driver wants,
        # and the driver copies the block before it returns.
        block = ctypes.c_char_p(pointers + plan.params)
        driver.launchKernel(
            plan.function, geometry.grid, 1, 1, geometry.threads, 1, 1, geometry.build.shared_bytes,
            stream, ctypes.addressof(block), 0,
        )  # fmt: skip


def launch(
    problem: GemmProblem,
    a: TensorView,
    b: TensorView,
    out: TensorView,
    bias: TensorView | None,
    execution: Execution,
    chosen: Launch | None = None,
) -> None:
    """Enqueue the product on the execution's stream. Nothing waits for the device, nothing is read back.

    Raises DeviceError where the device or its driver reports a fault, BuildError where the kernel does not compile.
    """
    if problem.m == 0 or problem.n == 0 or 0 in problem.batch:
        return
    index, stream = problem.device.index, execution.stream
    try:
        before = runtime.getDevice()
        # A thread that has made no CUDA call yet has no context, even on the right device.
        if before != index or not driver.ctxGetCurrent():
            runtime.setDevice(index)
        try:
            plan = _plan(problem, stream) if chosen is None else plan_for(problem, describe(index), stream, chosen)
            enqueue(plan, a, b, out, bias, execution)
        finally:
            if before != index:
                runtime.setDevice(before)
    except (driver.CUDADriverError, runtime.CUDARuntimeError, LaunchFailure) as error:
        raise DeviceError(
            f"cuda:{index} reported {error} at {problem.contract} gemm of m={problem.m}, n={problem.n}, k={problem.k}"
        ) from error


def product(device: CudaDevice, contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
    """The product of NumPy arrays a [M, K] and b [K, N] on a device, as a NumPy array: what the self-check compares.

    initial: float32 [M, N], where the accumulation starts; the result is float32 then, else of the operands' type.
    """
    operand = from_numpy(a.dtype)
    out_dtype = operand if initial is None else F32
    if operand is None or out_dtype is None:
        raise ArgumentError(f"a of {a.dtype} has no kernel")
    where = Device("cuda", device.index)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True) as stream:

        def view(array: Any, dtype: DType) -> TensorView:
            strides = tuple(stride // dtype.itemsize for stride in array.strides)
            return TensorView(array.data.ptr, array.shape, strides, dtype, where, array=array)

        def allocate(size: int) -> TensorView:
            return view(cupy.empty(size, np.uint8), E4M3)

        on_device = [cupy.asarray(np.ascontiguousarray(array).view(operand.bits)) for array in (a, b)]
        if initial is None:
            out = cupy.empty((a.shape[0], b.shape[1]), out_dtype.bits)
        else:
            out = cupy.asarray(np.ascontiguousarray(initial).view(F32.bits))
        views = [view(array, operand) for array in on_device]
        target = view(out, out_dtype)
        problem = gemm_problem(contract, views[0], views[1], target, None, initial is not None)
        launch(problem, views[0], views[1], target, None, Execution(where, stream.ptr, allocate))
        return cupy.asnumpy(out, stream=stream).view(out_dtype.numpy)
