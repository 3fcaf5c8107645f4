"""The row operations on CUDA: which build of rows.cu computes a problem, its argument block, and the launch.

None of the choices here can change a bit: no row's chain is ever split.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass
from math import prod
from typing import Any

from ..backend import Execution, Kernel
from ..dtypes import BF16, E4M3, F16, F32, DType, from_numpy
from ..errors import ArgumentError, DetkernError, DeviceError
from ..problem import Matrix, RowKind, RowProblem, row_problem
from ..tensors import Device, TensorView
from . import selfcheck
from .device import CudaDevice, current, describe
from .geometry import Load
from .loader import KernelBuild, load_function

__all__ = [
    "MAX_SUM_RANK", "OPERANDS", "SEEN", "SOURCE", "RowLaunch", "RowTile", "build_for", "builds", "choose", "kernel", "launch",
    "load_path", "pack_params", "refusal", "rows_on", "tiles_for",
]  # fmt: skip

SOURCE = "rows.cu"
OPERANDS = (F32, F16, BF16)
MAX_SUM_RANK = 62
# Compute capabilities on which the kernel was compared with the replay before release: none so far, so every device is
# checked once.
SEEN: tuple[tuple[int, int], ...] = ()
THREADS = 288
_GRID_LIMIT = 2**31 - 1  # blocks along x

# RowParams of rows.cu: three pointers, then sizes, strides, codes and the batch.
_POINTERS = struct.Struct("<3Q")
_FIELDS = struct.Struct(f"<9q6i{4 * MAX_SUM_RANK}q")

_PLANS = 1024  # kept at most


@dataclass(frozen=True, slots=True)
class RowTile:
    """How the kernel is built: its load path (vectors, or element by element) and its rows."""

    vector: bool
    rows: int

    def columns(self, kind: RowKind) -> int:
        """CHUNK in the kernel file."""
        both = kind in (RowKind.SOFTMAX_BACKWARD, RowKind.LOG_SOFTMAX_BACKWARD)
        return (2048 if both or not self.vector else 4096) // self.rows


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """A build of the kernel and the CTAs that it is launched with."""

    tile: RowTile
    build: KernelBuild
    grid: int


def tiles_for(vector: bool) -> tuple[RowTile, ...]:
    """The tiles of a load path, fewest rows first."""
    return tuple(RowTile(vector, rows) for rows in ((1, 8, 32) if vector else (1, 32)))


def build_for(kind: RowKind, operand: DType, tile: RowTile) -> KernelBuild:
    """What is compiled for a kind, a tile and the type of the operand with columns."""
    macros = (("KIND", int(kind)), ("OPERAND", operand.code), ("LOAD", int(tile.vector)), ("ROWS", tile.rows))
    return KernelBuild(SOURCE, macros, 0)


def _operands(kind: RowKind) -> tuple[DType, ...]:
    """The types that a kind is built for: where no operand has columns, one."""
    return (F32,) if kind.spreads and kind.operands == 1 else OPERANDS


def builds() -> list[KernelBuild]:
    """Every build that a launch may need, on any device."""
    return [
        build_for(kind, operand, tile)
        for kind in RowKind
        for operand in _operands(kind)
        for vector in (True, False)
        for tile in tiles_for(vector)
    ]


def _wide(problem: RowProblem) -> Matrix:
    """The operand with columns, or out where there is none."""
    if problem.b is not None:
        return problem.b
    return problem.out if problem.kind.spreads else problem.a


def _in_pieces(matrix: Matrix) -> bool:
    """Whether adjacent columns lie in aligned pieces of 16 bytes. Strides along a size of 1 are 0 in a problem."""
    unit = 16 // matrix.dtype.itemsize
    strides = (matrix.row_stride, *matrix.batch_strides)
    return matrix.alignment == 16 and matrix.col_stride == 1 and not any(stride % unit for stride in strides)


def load_path(problem: RowProblem) -> Load:
    """MN_MAJOR where every operand with columns can be read in pieces, else STRIDED."""
    matrices = [_wide(problem)] if problem.kind.spreads or problem.b is None else [problem.a, problem.b]
    return Load.MN_MAJOR if all(_in_pieces(matrix) for matrix in matrices) else Load.STRIDED


def _along_rows(problem: RowProblem) -> bool:
    """Whether neighbouring rows lie closer than neighbouring columns."""
    wide = _wide(problem)
    return problem.m > 1 and abs(wide.row_stride) < abs(wide.col_stride)


def choose(problem: RowProblem, multiprocessors: int, tile: RowTile | None = None) -> RowLaunch:
    """The launch of a problem. Chains want many rows a CTA, which one warp adds at once; where there are too few rows to
    give each multiprocessor that many, they are spread. tile: another one, for tests."""
    rows = problem.m * prod(problem.batch)
    if tile is None:
        available = tiles_for(load_path(problem) != Load.STRIDED)
        fitting = [each for each in available if each.rows == 1 or rows >= multiprocessors * each.rows // 2]
        tile = available[-1] if _along_rows(problem) and not available[-1].vector else fitting[-1]
    operand = _wide(problem).dtype if len(_operands(problem.kind)) > 1 else F32
    tiles = -(-rows // tile.rows)
    if problem.kind.spreads:
        tiles *= -(-problem.n // tile.columns(problem.kind))
    return RowLaunch(tile, build_for(problem.kind, operand, tile), max(1, min(tiles, _GRID_LIMIT)))


def pack_params(problem: RowProblem) -> bytes:
    """RowParams after its pointers."""
    padding = (0,) * (MAX_SUM_RANK - len(problem.batch))
    b = problem.b
    nothing = (0,) * len(problem.batch)
    return _FIELDS.pack(
        problem.m * prod(problem.batch), problem.m, problem.n,
        problem.a.row_stride, problem.a.col_stride,
        0 if b is None else b.row_stride, 0 if b is None else b.col_stride,
        problem.out.row_stride, problem.out.col_stride,
        problem.a.dtype.code, problem.out.dtype.code, int(_in_pieces(problem.out)), int(_along_rows(problem)),
        len(problem.batch), 0,
        *problem.batch, *padding,
        *problem.a.batch_strides, *padding,
        *(nothing if b is None else b.batch_strides), *padding,
        *problem.out.batch_strides, *padding,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about a launch but its pointers and its stream."""

    function: int  # CUfunction
    grid: int
    params: bytes


_plans: dict[RowProblem, _Plan] = {}
_lock = threading.Lock()


def _plan_for(problem: RowProblem, stream: int, chosen: RowLaunch | None) -> _Plan:
    """A new plan. The kernel is compiled and loaded here, on the device, which must be current."""
    device = describe(problem.device.index)
    if chosen is None:
        chosen = choose(problem, device.multiprocessors)
    function = load_function(device.index, device.capability, chosen.build, stream)
    return _Plan(function.ptr, chosen.grid, pack_params(problem))


def _plan(problem: RowProblem, stream: int) -> _Plan:
    plan = _plans.get(problem)
    if plan is None:
        plan = _plan_for(problem, stream, None)
        with _lock:
            while len(_plans) >= _PLANS:
                del _plans[next(iter(_plans))]
            _plans[problem] = plan
    return plan


def launch(
    problem: RowProblem,
    a: TensorView,
    b: TensorView | None,
    out: TensorView,
    execution: Execution,
    chosen: RowLaunch | None = None,
) -> None:
    """Enqueue the operation on the execution's stream. Nothing waits for the device, nothing is read back, no memory is
    taken: once the kernel has been loaded, the call can be captured into a graph.

    Raises DeviceError where the device or its driver reports a fault, BuildError where the kernel does not compile.
    """
    from cupy.cuda import driver, runtime

    index, stream = problem.device.index, execution.stream
    try:
        with current(index):
            plan = _plan(problem, stream) if chosen is None else _plan_for(problem, stream, chosen)
            pointers = _POINTERS.pack(a.pointer, 0 if b is None else b.pointer, out.pointer)
            # A char* to the block: the address of that pointer is the array of one parameter that the driver wants, and
            # the driver copies the block before it returns.
            block = ctypes.c_char_p(pointers + plan.params)
            driver.launchKernel(plan.function, plan.grid, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(block), 0)
    except (driver.CUDADriverError, runtime.CUDARuntimeError) as error:
        rows = problem.m * prod(problem.batch)
        raise DeviceError(
            f"cuda:{index} reported {error} at {problem.kind.label} of {rows} rows, n={problem.n}"
        ) from error


def kernel(problem: RowProblem, device: CudaDevice) -> Kernel:
    """What `launch` would start."""
    chosen = choose(problem, device.multiprocessors)
    return Kernel(
        name=f"{problem.kind.label} ({SOURCE})",
        tile=f"{chosen.tile.rows} rows x {chosen.tile.columns(problem.kind)} columns, "
        + ("pieces of 16 bytes" if chosen.tile.vector else "any strides"),
        geometry=f"grid {chosen.grid}, {THREADS} threads",
    )


def refusal(device: CudaDevice, problem: RowProblem) -> str | None:
    """Why the device does not offer the operation, or None: one on which it has not been compared with the replay is
    checked once."""
    if device.capability in SEEN:
        return None
    kind, operand = problem.kind, (problem.b or problem.a).dtype
    try:
        found = selfcheck.rows_outcome(device, kind, operand, SOURCE, functools.partial(rows_on, device))
    except DetkernError as error:  # not an answer yet: the next call tries again
        return f"the self-check of {kind.label} on {device} did not finish: {error}"
    return f"{kind.label} for {operand.short} on {device} {found}" if found.differing else None


def rows_on(device: CudaDevice, kind: RowKind, a: Any, b: Any, width: int) -> Any:
    """The operation on NumPy arrays on a device, as a float32 NumPy array: what the self-check compares."""
    import cupy
    import numpy as np

    where = Device("cuda", device.index)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True) as stream:

        def view(array: Any, dtype: DType) -> TensorView:
            strides = tuple(stride // dtype.itemsize for stride in array.strides)
            return TensorView(array.data.ptr, array.shape, strides, dtype, where, array=array)

        def upload(array: Any) -> TensorView:
            dtype = from_numpy(array.dtype)
            if dtype is None:
                raise ArgumentError(f"{array.dtype} has no kernel")
            return view(cupy.asarray(np.ascontiguousarray(array).view(dtype.bits)), dtype)

        def allocate(size: int) -> TensorView:
            return view(cupy.empty(size, np.uint8), E4M3)

        first = upload(a[:, None] if kind.spreads else a)
        second = None if b is None else upload(b)
        out = cupy.empty((a.shape[0], 1 if kind.reduces else width), np.uint32)
        target = view(out, F32)
        problem = row_problem(kind, first, second, target, width)
        launch(problem, first, second, target, Execution(where, stream.ptr, allocate))
        result = cupy.asnumpy(out, stream=stream).view(np.float32)
        return result[:, 0].copy() if kind.reduces else result
