"""From a problem to kernels on the caller's stream, through Triton's own launcher."""

from __future__ import annotations

import contextlib
import importlib
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np

from ..dispatch.backend import Execution
from ..dispatch.plan_cache import PlanCache
from ..errors import BuildError, DeviceError
from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import batch_offsets
from ..operations.problem import Operands
from ..tensors import Device, TensorView
from ..vocabulary.dtypes import E4M3, F32, DType
from .device import TritonDevice, current, describe
from .geometry import Launch, choose

__all__ = ["COLUMN_TILE", "Launches", "Placing", "Plan", "Sums", "compile_ahead", "plan_for"]

# Columns of a program, rows of a turn and warps of the bias gradient.
COLUMN_TILE = (128, 8, 4)

_GRID = 2**31 - 1  # programs along x
_RANK = 3  # batch dimensions of one launch
_PLANS = 256  # numbers of rows of one layout, kept at most

# Kernels compiled and loaded by this process, by device, and scratch memory that captured graphs refer to: nothing
# tells when a graph is gone, so it stays for good.
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
    """A launch but for its pointers. arguments: sizes, strides and codes, in the kernel's order; offsets: what is added
    to a, b and out, in bytes, for each launch of a batch that has more dimensions than one launch takes."""

    launch: Launch
    arguments: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    constants: dict[str, Any]
    key: Any


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


def _on(execution: Execution) -> AbstractContextManager[None]:
    """Triton's interpreter, which runs these kernels on the CPU in tests, has no streams."""
    if execution.device.kind == "cpu":
        return contextlib.nullcontext()
    return current(execution.device, execution.stream)


def _start(kernel: Any, key: Any, device: Device, programs: int, arguments: tuple[int, ...], options: Any) -> None:
    """Launch on the current stream. The first launch of a kernel compiles and loads it, one at a time, and not while a
    graph is captured, which loading would break."""
    if key in _loaded or device.kind == "cpu":
        kernel[(programs,)](*arguments, **options)
        return
    torch = importlib.import_module("torch")
    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"a Triton kernel is not loaded on {device} yet and cannot be while a graph is captured; make the same "
            f"call once "
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


class Launches:
    """`backend.Run` of products: what launches one layout, by a plan that is made once for a number of rows. Nothing
    waits for the device, nothing is read back."""

    def __init__(self, problem: GemmProblem, chosen: Launch | None = None) -> None:
        """chosen: a launch instead of geometry.py's."""
        self._problem, self._chosen = problem, chosen
        self._plans: PlanCache[int, Plan] = PlanCache(_PLANS)

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue the product. Raises DeviceError where the device or its driver reports a fault, BuildError where the
        kernel does not compile."""
        a, b, bias = operands
        assert a is not None
        assert b is not None
        device = execution.device
        with _reported(device, self._problem.about), _on(execution):
            plan = self._plans.get(m) or self._plans.recall(m)
            if plan is None:
                multiprocessors = 1 if device.kind == "cpu" else describe(device).multiprocessors
                plan = self._plans.keep(m, plan_for(self._problem.with_rows(m), multiprocessors, self._chosen))
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


class Sums:
    """`backend.Run` of bias gradients. Batches of more dimensions than the kernel counts take one launch for each index
    of the outer ones, which carry the chains on in float32 scratch."""

    def __init__(self, problem: ColumnSumProblem) -> None:
        self._problem = problem

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue the sums. Raises as `Launches`."""
        (dc,) = operands
        assert dc is not None
        _enqueue_sums(self._problem.with_rows(m), dc, out, execution)


def _enqueue_sums(problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
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
                    first, pointer, start[0], end[0], problem.m, problem.n, problem.dc.row_stride,
                    problem.dc.col_stride,
                    start[1], end[1], end[2], *sizes, *strides,
                )  # fmt: skip
                _start(kernel, key, device, min(programs - first, _GRID), arguments, options)


class Placing:
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
        """A copy of a NumPy array, row-major, or column-major where it is."""
        if array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous:
            stored = self.put(array.T, dtype)
            return TensorView(
                stored.pointer, array.shape, stored.strides[::-1], dtype, self._device, array=stored.array
            )
        view = self.new(array.shape, dtype)
        bits = np.ascontiguousarray(array).view(f"i{dtype.itemsize}")
        view.array.copy_(self._torch.from_numpy(bits))
        return view

    def fetch(self, view: TensorView) -> Any:
        """What is in memory that was made here; waits for the stream."""
        return view.array.cpu().numpy().view(view.dtype.numpy)
