"""The row operations on CUDA: which build of rows.cu computes a problem, its argument block, and the launch.

None of the choices here can change a bit: a sum is exact up to its one rounding, however a row is divided.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

from .. import selfcheck
from ..backend import Execution, Kernel
from ..dtypes import BF16, F16, F32, DType
from ..operations.matrix import Matrix
from ..operations.rows.problem import RowKind, RowProblem, row_problem
from ..tensors import TensorView
from .block_launch import BlockLauncher, BlockPlan
from .device import SEEN, CudaDevice, describe
from .host_arrays import placing
from .loader import KernelBuild, load_function, source_digest

__all__ = [
    "MAX_SUM_RANK", "OPERANDS", "SOURCE", "RowLaunch", "RowLoad", "RowTile", "build_for", "builds", "choose", "holds",
    "kernel", "launch", "load_path", "pack_params", "refusal", "rows_on", "tiles_for",
]  # fmt: skip

SOURCE = "rows.cu"
OPERANDS = (F32, F16, BF16)
MAX_SUM_RANK = 62
_GRID_LIMIT = 2**31 - 1  # blocks along x

# RowParams of rows.cu: three pointers, then sizes, strides, codes and the batch.
_POINTERS = struct.Struct("<3Q")
_FIELDS = struct.Struct(f"<9q4i{4 * MAX_SUM_RANK}q")


class RowLoad(IntEnum):
    """How a row comes from global memory; the values are those of LOAD in rows.cu."""

    STRIDED = 0  # any strides, element by element
    VECTOR = 1  # adjacent columns, in pieces of 16 bytes
    ACROSS = 2  # any strides, neighbouring lanes in neighbouring rows


@dataclass(frozen=True, slots=True)
class RowTile:
    """How the kernel is built: the macros of rows.cu of the same names."""

    load: RowLoad
    threads: int
    rows: int
    values: int
    cluster: int = 1
    held: bool = True

    @property
    def columns(self) -> int:
        """Those of a row that its threads have at a time; SLAB in the kernel file."""
        return self.threads // self.rows * self.cluster * self.values

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        cluster = "" if self.cluster == 1 else f" by a cluster of {self.cluster}"
        return f"{rows} x {self.columns} columns{cluster}, {'held' if self.held else 'read for each pass'}"


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """A build of the kernel and the CTAs that it is launched with."""

    tile: RowTile
    build: KernelBuild
    grid: int


# Of each load path, in ascending order of the columns that they hold; those that hold none last.
_TILES = (
    RowTile(RowLoad.VECTOR, 128, 4, 8),
    RowTile(RowLoad.VECTOR, 128, 4, 32),
    RowTile(RowLoad.VECTOR, 256, 1, 16),
    RowTile(RowLoad.VECTOR, 512, 1, 32),
    RowTile(RowLoad.VECTOR, 1024, 1, 32),
    RowTile(RowLoad.VECTOR, 512, 1, 40, 8),
    RowTile(RowLoad.VECTOR, 512, 1, 16, 8, held=False),
    RowTile(RowLoad.VECTOR, 512, 1, 16, held=False),
    RowTile(RowLoad.STRIDED, 128, 4, 8),
    RowTile(RowLoad.STRIDED, 512, 1, 8),
    RowTile(RowLoad.STRIDED, 512, 1, 8, held=False),
    RowTile(RowLoad.ACROSS, 1024, 32, 8, held=False),
)
_SPREAD = (
    RowTile(RowLoad.VECTOR, 128, 4, 8),
    RowTile(RowLoad.VECTOR, 256, 1, 16),
    RowTile(RowLoad.STRIDED, 128, 4, 8),
    RowTile(RowLoad.STRIDED, 512, 1, 8),
    RowTile(RowLoad.ACROSS, 1024, 32, 8, held=False),
)
# Wide rows, so few of them that one CTA each would leave multiprocessors idle, go to clusters from here on.
_CLUSTER_COLUMNS = 8192
_CLUSTERS_FROM = (9, 0)  # compute capability
_REGISTERS = 65536  # of a multiprocessor


def _two(kind: RowKind) -> bool:
    """Whether two operands have columns."""
    return kind.operands == 2 and not kind.spreads


def _others(capability: tuple[int, int]) -> int:
    """The registers that a thread needs beside those that hold numbers of two operands, lest the compiler spill."""
    return 50 if capability[0] == 10 else 24


def tiles_for(kind: RowKind, load: RowLoad, capability: tuple[int, int]) -> tuple[RowTile, ...]:
    """The tiles of a kind and a load path on a device, those that hold most columns last."""
    return tuple(
        tile
        for tile in (_SPREAD if kind.spreads else _TILES)
        if tile.load == load
        and (tile.cluster == 1 or capability >= _CLUSTERS_FROM)
        and not (_two(kind) and 2 * tile.values + _others(capability) > _REGISTERS // tile.threads)
    )


def build_for(kind: RowKind, operand: DType, tile: RowTile) -> KernelBuild:
    """What is compiled for a kind, a tile and the type of the operand with columns."""
    macros = (
        ("KIND", int(kind)), ("OPERAND", operand.code), ("LOAD", int(tile.load)), ("THREADS", tile.threads),
        ("ROWS", tile.rows), ("VALUES", tile.values), ("CLUSTER", tile.cluster), ("HELD", int(tile.held)),
    )  # fmt: skip
    return KernelBuild(SOURCE, macros, 0)


def _operands(kind: RowKind) -> tuple[DType, ...]:
    """The types that a kind is built for: where no operand has columns, one."""
    return (F32,) if kind.spreads and kind.operands == 1 else OPERANDS


def builds(capability: tuple[int, int]) -> list[KernelBuild]:
    """Every build that a launch may need on a device of this compute capability."""
    return [
        build_for(kind, operand, tile)
        for kind in RowKind
        for operand in _operands(kind)
        for load in RowLoad
        for tile in tiles_for(kind, load, capability)
    ]


def _wide(problem: RowProblem) -> Matrix:
    """The operand with columns, or out where there is none."""
    if problem.b is not None:
        return problem.b
    return problem.out if problem.kind.spreads else problem.a


def _in_step(matrix: Matrix) -> bool:
    """Whether all rows begin at multiples of 16 bytes. Strides along a size of 1 are 0 in a problem."""
    unit = 16 // matrix.dtype.itemsize
    return matrix.alignment == 16 and not any(stride % unit for stride in (matrix.row_stride, *matrix.batch_strides))


def _along_rows(problem: RowProblem) -> bool:
    """Whether neighbouring rows lie closer than neighbouring columns."""
    wide = _wide(problem)
    return problem.m > 1 and 0 < abs(wide.row_stride) < abs(wide.col_stride)


def load_path(problem: RowProblem) -> RowLoad:
    """VECTOR where columns are adjacent and two operands' rows begin equally far past a multiple of 16 bytes; where that is
    not known, STRIDED."""
    matrices = [problem.a, problem.b] if _two(problem.kind) else [_wide(problem)]
    if all(matrix is not None and matrix.col_stride == 1 for matrix in matrices):
        a, b = matrices[0], matrices[-1]
        assert a is not None
        assert b is not None
        unit = 16 // a.dtype.itemsize
        pairs = zip((a.row_stride, *a.batch_strides), (b.row_stride, *b.batch_strides), strict=True)
        if len(matrices) == 1 or (a.alignment == b.alignment == 16 and all((x - y) % unit == 0 for x, y in pairs)):
            return RowLoad.VECTOR
    return RowLoad.ACROSS if _along_rows(problem) else RowLoad.STRIDED


def holds(problem: RowProblem, tile: RowTile) -> bool:
    """Whether the tile's threads have all columns of a row at once. A row that begins within a piece needs a piece more."""
    if tile.load == RowLoad.VECTOR and not _in_step(_wide(problem)):
        return problem.n + 16 // _wide(problem).dtype.itemsize - 1 <= tile.columns
    return problem.n <= tile.columns


def _tile(problem: RowProblem, capability: tuple[int, int], multiprocessors: int) -> RowTile:
    available = tiles_for(problem.kind, load_path(problem), capability)
    fitting = [tile for tile in available if tile.held and holds(problem, tile)]
    if problem.kind.spreads:
        return (fitting or available[-1:])[0]
    loops = [tile for tile in available if not tile.held]
    rows = problem.m * prod(problem.batch)
    if problem.n >= _CLUSTER_COLUMNS and rows <= multiprocessors // 2:
        fitting = [tile for tile in fitting if tile.cluster > 1] or fitting
    return (fitting or loops)[0]


def choose(
    problem: RowProblem, capability: tuple[int, int], multiprocessors: int, tile: RowTile | None = None
) -> RowLaunch:
    """The launch of a problem: the smallest tile that holds a row, so that it is read once. tile: another one, for tests."""
    tile = tile or _tile(problem, capability, multiprocessors)
    operand = _wide(problem).dtype if len(_operands(problem.kind)) > 1 else F32
    tiles = -(-problem.m * prod(problem.batch) // tile.rows)
    if problem.kind.spreads:
        tiles *= -(-(problem.n + 16) // tile.columns)
    grid = min(tiles, _GRID_LIMIT // tile.cluster) * tile.cluster
    return RowLaunch(tile, build_for(problem.kind, operand, tile), max(tile.cluster, grid))


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
        problem.a.dtype.code, problem.out.dtype.code, len(problem.batch), 0,
        *problem.batch, *padding,
        *problem.a.batch_strides, *padding,
        *(nothing if b is None else b.batch_strides), *padding,
        *problem.out.batch_strides, *padding,
    )  # fmt: skip


def _plan_for(problem: RowProblem, stream: int, chosen: RowLaunch | None) -> BlockPlan:
    device = describe(problem.device.index)
    if chosen is None:
        chosen = choose(problem, device.capability, device.multiprocessors)
    function = load_function(device.index, device.capability, chosen.build, stream)
    return BlockPlan(function.ptr, chosen.grid, chosen.tile.threads, chosen.build.shared_bytes, pack_params(problem))


_launcher = BlockLauncher(_plan_for)


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
    pointers = _POINTERS.pack(a.pointer, 0 if b is None else b.pointer, out.pointer)
    _launcher(problem, pointers, execution.stream, chosen)


def kernel(problem: RowProblem, device: CudaDevice) -> Kernel:
    """What `launch` would start."""
    chosen = choose(problem, device.capability, device.multiprocessors)
    loads = {RowLoad.VECTOR: "pieces of 16 bytes", RowLoad.STRIDED: "any strides", RowLoad.ACROSS: "across rows"}
    return Kernel(
        name=f"{problem.kind.label} ({SOURCE})",
        tile=f"{chosen.tile}, {loads[chosen.tile.load]}",
        geometry=f"grid {chosen.grid}, {chosen.tile.threads} threads",
    )


def refusal(device: CudaDevice, problem: RowProblem) -> str | None:
    """Why the device does not offer the operation, or None: one on which it has not been compared with the replay is
    checked once."""
    if device.capability in SEEN:
        return None
    kind, operand = problem.kind, (problem.b or problem.a).dtype

    def run() -> selfcheck.Outcome:
        operation = functools.partial(rows_on, device)
        return selfcheck.rows_outcome(device, kind, operand, "cuda", source_digest((SOURCE,)), operation)

    return selfcheck.refusal(kind.label, operand, device, run)


def rows_on(device: CudaDevice, kind: RowKind, a: Any, b: Any, width: int) -> Any:
    """The operation on NumPy arrays on a device, as a float32 NumPy array: what the self-check compares."""
    with placing(device) as there:
        first = there.put(a[:, None] if kind.spreads else a, selfcheck.types_of(a, None, "a")[0])
        second = None if b is None else there.put(b, selfcheck.types_of(b, None, "b")[0])
        target = there.new((a.shape[0], 1 if kind.reduces else width), F32)
        launch(row_problem(kind, first, second, target, width), first, second, target, there.execution)
        result = there.fetch(target)
        return result[:, 0].copy() if kind.reduces else result
