"""The row operations on CUDA: which build of rows.cu computes a problem, its argument block, and the launch. Sums that
row_sums.cu computes, and prefix sums, are launched from here too.

None of the choices here can change a bit: a sum is exact up to its one rounding, however a row is divided.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

from ..dispatch.backend import Execution, Kernel, Run
from ..operations.matrix import Matrix
from ..operations.problem import Operands
from ..operations.rows.operation import KINDS as KINDS_BY_NAME
from ..operations.rows.operation import ROWS
from ..operations.rows.problem import RowKind, RowProblem
from ..tensors import TensorView
from ..vocabulary.dtypes import BF16, F16, F32, DType
from . import block_launch, row_scans, row_sums
from .block_launch import BlockPlan, BlockRun
from .device import describe
from .implementation import CudaImplementation
from .loader import KernelBuild, load_function
from .row_scans import ScanLaunch
from .row_sums import SumLaunch

__all__ = [
    "KINDS", "MAX_SUM_RANK", "OPERANDS", "SOURCE", "RowLaunch", "RowLoad", "RowTile", "Rows", "build_for", "builds",
    "choose", "holds",
    "launch", "load_path", "pack_params", "tiles_for",
]  # fmt: skip

SOURCE = "rows.cu"
OPERANDS = (F32, F16, BF16)
MAX_SUM_RANK = 62
_GRID_LIMIT = 2**31 - 1  # blocks along x

KINDS = tuple(kind for kind in RowKind if not kind.scans)  # of rows.cu

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
    held = " held" if tile.held else ""
    size = f"{tile.threads}x{tile.values}x{tile.rows}x{tile.cluster}"
    return KernelBuild(SOURCE, macros, 0, f"rows {kind.name} {operand.short} {size}{held} {tile.load.name}")


def _operands(kind: RowKind) -> tuple[DType, ...]:
    """The types that a kind is built for: where no operand has columns, one."""
    return (F32,) if kind.spreads and kind.operands == 1 else OPERANDS


def builds(capability: tuple[int, int]) -> list[KernelBuild]:
    """Every build that a launch may need on a device of this compute capability."""
    found = [
        build_for(kind, operand, tile)
        for kind in KINDS
        for operand in _operands(kind)
        for load in RowLoad
        for tile in tiles_for(kind, load, capability)
    ]
    return [*found, *row_sums.builds(), *row_scans.builds()]


def _wide(problem: RowProblem) -> Matrix:
    """The operand with columns, or out where there is none."""
    if problem.b is not None:
        return problem.b
    return problem.out if problem.kind.spreads else problem.a


def _along_rows(problem: RowProblem) -> bool:
    """Whether neighbouring rows lie closer than neighbouring columns."""
    wide = _wide(problem)
    return problem.m > 1 and 0 < abs(wide.row_stride) < abs(wide.col_stride)


def load_path(problem: RowProblem) -> RowLoad:
    """VECTOR where columns are adjacent and two operands' rows begin equally far past a multiple of 16 bytes; where
    that is not known, STRIDED."""
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
    """Whether the tile's threads have all columns of a row at once. A row that begins within a piece needs a piece
    more."""
    wide = _wide(problem)
    if tile.load == RowLoad.VECTOR and not wide.aligned(wide.row_stride):
        return problem.n + 16 // wide.dtype.itemsize - 1 <= tile.columns
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
    """The launch of a problem: the smallest tile that holds a row, so that it is read once. tile: another one, for
    tests."""
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


_Launch = RowLaunch | SumLaunch | ScanLaunch


def _choose(problem: RowProblem) -> _Launch:
    device = describe(problem.device.index)
    if problem.kind.scans:
        return row_scans.choose(problem, device.multiprocessors)
    sums = row_sums.choose(problem, device.multiprocessors)
    return sums or choose(problem, device.capability, device.multiprocessors)


def _plan_for(problem: RowProblem, stream: int, chosen: _Launch | None = None) -> BlockPlan:
    device = describe(problem.device.index)
    chosen = chosen or _choose(problem)

    def function(build: KernelBuild) -> Any:
        return load_function(device.index, device.capability, build, stream).ptr

    if isinstance(chosen, RowLaunch):
        loaded, params = function(chosen.build), pack_params(problem)
        return BlockPlan(problem, loaded, chosen.grid, chosen.tile.threads, chosen.build.shared_bytes, params)
    if isinstance(chosen, ScanLaunch):
        steps = [(function(build), grid, row_scans.THREADS) for build, grid in chosen.steps]
        params = row_scans.pack_params(problem, chosen)
    else:
        steps = [(function(build), grid, threads) for build, grid, threads in chosen.steps]
        params = row_sums.pack_params(problem, chosen)
    return BlockPlan(problem, *steps[0], 0, params, tuple(steps[1:]), chosen.scratch_bytes(problem))


def _head(operands: Operands, out: TensorView) -> bytes:
    first, second = operands[0], operands[-1] if len(operands) > 1 else None
    assert first is not None
    return _POINTERS.pack(first.pointer, 0 if second is None else second.pointer, out.pointer)


def launch(
    problem: RowProblem,
    a: TensorView,
    b: TensorView | None,
    out: TensorView,
    execution: Execution,
    chosen: _Launch | None = None,
) -> None:
    """Enqueue the operation once, by a launch of the caller's. Raises as what `Rows.prepare` gives."""
    plan_for = functools.partial(_plan_for, problem, execution.stream, chosen)
    block_launch.launch(problem, plan_for, _head((a, b), out), execution)


def _sources(variant: str) -> tuple[str, ...]:
    return (row_scans.SOURCE,) if KINDS_BY_NAME[variant].scans else (SOURCE, row_sums.SOURCE)


class Rows(CudaImplementation[RowProblem]):
    """The row operations."""

    def __init__(self) -> None:
        super().__init__(ROWS, _sources)

    def builds(self, capability: tuple[int, int]) -> list[KernelBuild]:
        return builds(capability)

    def explain(self, problem: RowProblem) -> Kernel:
        chosen = _choose(problem)
        label = problem.kind.label
        if isinstance(chosen, ScanLaunch):
            geometry = f"grid {chosen.steps[0][1]}, {row_scans.THREADS} threads"
            return Kernel(name=f"{label} ({row_scans.SOURCE})", tile=str(chosen), geometry=geometry)
        if isinstance(chosen, SumLaunch):
            _, grid, threads = chosen.steps[0]
            parts = f", {chosen.parts} parts a row" if chosen.parts > 1 else ""
            return Kernel(
                name=f"{label} ({row_sums.SOURCE})",
                tile=f"{chosen.tile}{parts}",
                geometry=f"grid {grid}, {threads} threads",
            )
        loads = {RowLoad.VECTOR: "pieces of 16 bytes", RowLoad.STRIDED: "any strides", RowLoad.ACROSS: "across rows"}
        return Kernel(
            name=f"{label} ({SOURCE})",
            tile=f"{chosen.tile}, {loads[chosen.tile.load]}",
            geometry=f"grid {chosen.grid}, {chosen.tile.threads} threads",
        )

    def prepare(self, problem: RowProblem, execution: Execution) -> Run:
        """What enqueues the operation. Nothing waits for the device, nothing is read back, and memory is taken where
        few rows are long: once the kernels have been loaded, the call can be captured into a graph."""
        return BlockRun(problem, _plan_for, _head)
