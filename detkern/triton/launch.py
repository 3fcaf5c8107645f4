"""From a problem to kernels on the caller's stream, through Triton's own launcher."""

from __future__ import annotations

import contextlib
import importlib
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from .. import selfcheck
from ..backend import Execution
from ..contracts import Contract
from ..dtypes import E4M3, F32, DType
from ..errors import BuildError, DeviceError
from ..operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from ..operations.gemm.problem import GemmProblem, gemm_problem
from ..operations.matrix import batch_offsets
from ..plan_cache import PlanCache
from ..tensors import Device, TensorView
from .device import TritonDevice, current, describe
from .geometry import Launch, choose

__all__ = ["COLUMN_TILE", "Plan", "column_sum", "column_sum_on", "compile_ahead", "launch", "plan_for", "product"]

# Columns of a program, rows of a turn and warps of the bias gradient.
COLUMN_TILE = (128, 8, 4)

_GRID = 2**31 - 1  # programs along x
_RANK = 3  # batch dimensions of one launch
_PLANS = 4096

# Kernels compiled and loaded by this process, by device, and scratch memory that captured graphs refer to: nothing tells when
# a graph is gone, so it stays for good.
_loaded: set[Any] = set()
_captured: list[Any] = []
_lock = threading.Lock()


@cache
def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{__package__}.kernels.{module}"), name)


@cache
def _element(dtype: DType) -> Any:
    language = importlib.import_module("triton.language")
    return getattr(language, dtype.name)


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch but for its pointers. arguments: sizes, strides and codes, in the kernel's order; offsets: what is added to a,
    b and out, in bytes, for each launch of a batch that has more dimensions than one launch takes."""

    launch: Launch
    arguments: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    constants: dict[str, Any]
    key: Any


_plans: PlanCache[GemmProblem, Plan] = PlanCache(_PLANS)


def plan_for(problem: GemmProblem, multiprocessors: int, chosen: Launch | None = None) -> Plan:
    """A new plan. chosen: a launch instead of geometry.py's."""
    chosen = chosen or choose(problem, multiprocessors)
    a, b, out, bias = problem.a, problem.b, problem.out, problem.bias
    outer = max(len(problem.batch) - _RANK, 0)
    missing = (0,) * (_RANK - len(problem.batch) + outer)
    sizes = (1,) * len(missing) + problem.batch[outer:]
    arguments = (
        problem.m, problem.n, problem.k, a.row_stride, a.col_stride, b.row_stride, b.col_stride, out.row_stride,
        out.col_stride, 0 if bias is None else bias.stride, out.dtype.code, 0 if bias is None else bias.dtype.code,
        *sizes[1:],
        *(stride for x in (a, b, out) for stride in missing + x.batch_strides[outer:]),
    )  # fmt: skip
    offsets = batch_offsets(problem.batch[:outer], a, b, out)
    constants = chosen.constants(problem) | {"OPERAND": _element(a.dtype)}
    key = (problem.device, chosen.kernel, tuple((name, str(value)) for name, value in constants.items()), chosen.tile)
    return Plan(chosen, arguments, offsets, constants, key)


def _plan(problem: GemmProblem, multiprocessors: int) -> Plan:
    return _plans.get(problem) or _plans.keep(problem, plan_for(problem, multiprocessors))


def _on(execution: Execution) -> AbstractContextManager[None]:
    """Triton's interpreter, which runs these kernels on the CPU in tests, has no streams."""
    if execution.device.kind == "cpu":
        return contextlib.nullcontext()
    return current(execution.device, execution.stream)


def _start(kernel: Any, key: Any, device: Device, programs: int, arguments: tuple[int, ...], options: Any) -> None:
    """Launch on the current stream. The first launch of a kernel compiles and loads it, one at a time, and not while a graph
    is captured, which loading would break."""
    if key in _loaded or device.kind == "cpu":
        kernel[(programs,)](*arguments, **options)
        return
    torch = importlib.import_module("torch")
    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"a Triton kernel is not loaded on {device} yet and cannot be while a graph is captured; make the same call once "
            "before the capture"
        )
    with _lock:
        kernel[(programs,)](*arguments, **options)
        _loaded.add(key)


@contextlib.contextmanager
def _reported(device: Device, what: str) -> Any:
    """Triton's and PyTorch's errors as detkern's."""
    try:
        yield
    except (DeviceError, BuildError):
        raise
    except Exception as error:
        compiler = importlib.import_module("triton.compiler.errors")
        resources = importlib.import_module("triton.runtime.errors")
        if isinstance(error, (compiler.CompilationError, resources.OutOfResources, resources.PTXASError)):
            raise BuildError(f"Triton did not compile {what} for {device}: {error}") from error
        if isinstance(error, RuntimeError):
            raise DeviceError(f"{device} reported {error} at {what}") from error
        raise


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
    device = execution.device
    with _reported(device, problem.about), _on(execution):
        multiprocessors = 1 if device.kind == "cpu" else describe(device).multiprocessors
        plan = _plan(problem, multiprocessors) if chosen is None else plan_for(problem, multiprocessors, chosen)
        geometry = plan.launch
        scratch = execution.allocate(geometry.scratch_bytes) if geometry.scratch_bytes else None
        if scratch is not None and device.kind != "cpu":
            _keep_if_captured(scratch)
        kernel = _kernel(geometry.kernel, f"{geometry.kernel}_gemm")
        for a_offset, b_offset, out_offset in plan.offsets:
            pointers = (
                a.pointer + a_offset, b.pointer + b_offset, out.pointer + out_offset,
                0 if bias is None else bias.pointer, 0 if scratch is None else scratch.pointer,
            )  # fmt: skip
            arguments, options = _call(plan, pointers)
            for first in range(0, geometry.programs, _GRID):
                programs = min(geometry.programs - first, _GRID)
                _start(kernel, plan.key, device, programs, (first, *arguments), options)


def compile_ahead(problem: GemmProblem, chosen: Launch | None = None) -> None:
    """Compile the kernel of a problem into Triton's cache on disk, launching nothing. The device must be there."""
    with current(problem.device, 0):
        plan = plan_for(problem, describe(problem.device).multiprocessors, chosen)
        arguments, options = _call(plan, (0, 0, 0, 0, 0))
        _kernel(plan.launch.kernel, f"{plan.launch.kernel}_gemm").warmup(0, *arguments, grid=(1,), **options)


def _call(plan: Plan, pointers: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A launch's arguments after the number of its first program, and its constants and options."""
    tile = plan.launch.tile
    extra = (plan.launch.tiles, plan.launch.levels) if plan.launch.kernel == "tree" else ()
    options = plan.constants | {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return (*pointers, *plan.arguments, *extra), options


def _keep_if_captured(scratch: TensorView) -> None:
    """PyTorch gives each graph a pool of memory of its own; CuPy's would hand the scratch to others between replays."""
    torch = importlib.import_module("torch")
    if not isinstance(scratch.array, torch.Tensor) and torch.cuda.is_current_stream_capturing():
        _captured.append(scratch.array)


def column_sum(problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
    """Enqueue the bias gradient on the execution's stream. Raises as `launch`.

    Batches of more dimensions than the kernel counts take one launch for each index of the outer ones, which carry the
    chains on in float32 scratch.
    """
    if problem.n == 0:
        return
    device = execution.device
    columns, unroll, warps = COLUMN_TILE
    outer = max(len(problem.batch) - _RANK, 0)
    missing = _RANK - len(problem.batch) + outer
    sizes = (1,) * missing + problem.batch[outer:]
    strides = (0,) * missing + problem.dc.batch_strides[outer:]
    offsets = batch_offsets(problem.batch[:outer], problem.dc)
    with _reported(device, problem.about), _on(execution):
        carry = execution.allocate(4 * problem.n) if len(offsets) > 1 else None
        if carry is not None and device.kind != "cpu":
            _keep_if_captured(carry)
        carried = (0, 0, F32.code) if carry is None else (carry.pointer, 1, F32.code)
        target = (out.pointer, problem.out.stride, problem.out.dtype.code)
        begin = target if problem.accumulate else (0, 0, F32.code)
        options = {
            "OPERAND": _element(problem.dc.dtype), "ADJACENT": problem.dc.col_stride == 1, "UNROLL": unroll,
            "BLOCK_N": columns, "num_warps": warps, "num_stages": 1, "enable_fp_fusion": False,
        }  # fmt: skip
        key = (device, "column_sum", problem.dc.dtype, options["ADJACENT"])
        kernel = _kernel("column_sum", "column_sum")
        for position, (offset,) in enumerate(offsets):
            pointer = dc.pointer + offset
            start = begin if position == 0 else carried
            end = target if position == len(offsets) - 1 else carried
            programs = -(-problem.n // columns)
            for first in range(0, programs, _GRID):
                arguments = (
                    first, pointer, start[0], end[0], problem.m, problem.n, problem.dc.row_stride, problem.dc.col_stride,
                    start[1], end[1], end[2], *sizes, *strides,
                )  # fmt: skip
                _start(kernel, key, device, min(programs - first, _GRID), arguments, options)


def product(device: TritonDevice, contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
    """The product of NumPy arrays a [M, K] and b [K, N] on a device, as a NumPy array: what the self-check compares.

    initial: float32 [M, N], where the accumulation starts; the result is float32 then, else of the operands' type.
    """
    operand, out_dtype = selfcheck.types_of(a, initial, "a")
    with _Placing(device) as there:
        # Columns of a and rows of b: one load path, and so one kernel, for every k.
        columns, right = there.put(a.T, operand), there.put(b, operand)
        left = TensorView(columns.pointer, a.shape, (1, a.shape[0]), operand, columns.device, array=columns.array)
        target = there.put(initial, F32) if initial is not None else there.new((a.shape[0], b.shape[1]), out_dtype)
        problem = gemm_problem(contract, left, right, target, None, initial is not None)
        launch(problem, left, right, target, None, there.execution)
        return there.fetch(target, out_dtype)


def column_sum_on(device: TritonDevice, dc: Any, initial: Any = None) -> Any:
    """The bias gradient of a NumPy array dc [M, N] on a device, likewise."""
    operand, out_dtype = selfcheck.types_of(dc, initial, "dc")
    with _Placing(device) as there:
        source = there.put(dc, operand)
        target = there.put(initial, F32) if initial is not None else there.new(dc.shape[1:], out_dtype)
        column_sum(column_sum_problem(source, target, initial is not None), source, target, there.execution)
        return there.fetch(target, out_dtype)


class _Placing:
    """NumPy arrays put into PyTorch's memory on a device, on a stream of their own."""

    def __init__(self, device: TritonDevice) -> None:
        self._torch = importlib.import_module("torch")
        self._place = self._torch.device("cuda", device.device.index)
        self._device = device.device

    def __enter__(self) -> Self:
        torch = self._torch
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(torch.cuda.device(self._place))
        stream = torch.cuda.Stream(device=self._place)
        self._stack.enter_context(torch.cuda.stream(stream))
        self.execution = Execution(self._device, stream.cuda_stream, lambda size: self.new((size,), E4M3))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def new(self, shape: tuple[int, ...], dtype: DType) -> TensorView:
        """Memory that is not initialised."""
        names = {1: "uint8", 2: "int16", 4: "int32"}
        array = self._torch.empty(shape, dtype=getattr(self._torch, names[dtype.itemsize]), device=self._place)
        return TensorView(array.data_ptr(), tuple(shape), array.stride(), dtype, self._device, array=array)

    def put(self, array: Any, dtype: DType) -> TensorView:
        """A copy of a NumPy array, row-major."""
        import numpy as np

        view = self.new(array.shape, dtype)
        bits = np.ascontiguousarray(array).view(f"i{dtype.itemsize}")
        view.array.copy_(self._torch.from_numpy(bits))
        return view

    def fetch(self, view: TensorView, dtype: DType) -> Any:
        """What is in memory that was made here; waits for the stream."""
        return view.array.cpu().numpy().view(dtype.numpy)
