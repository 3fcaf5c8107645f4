"""The bias gradient on CUDA: which build of column_sum.cu, or of column_sum_few.cu,
adds a problem's rows, its argument block, and the launch.

None of the choices here can change a bit: no column's rows are ever split.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

from ..dispatch.backend import Execution, Kernel, Run
from ..operations.bias_gradient.operation import BIAS_GRADIENT
from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.problem import Operands
from ..tensors import TensorView
from ..vocabulary.dtypes import BF16, F16, F32, DType
from . import block_launch
from .block_launch import BlockPlan, BlockRun
from .device import describe
from .gemm_tile import Load
from .implementation import CudaImplementation
from .loader import KernelBuild, load_function

__all__ = [
    "FEW", "MAX_SUM_RANK", "OPERANDS", "SOURCE", "SumLaunch", "SumTile", "Sums", "build_for", "builds", "choose",
    "launch", "load_path", "pack_params", "tiles_for",
]  # fmt: skip

SOURCE, FEW_SOURCE = "column_sum.cu", "column_sum_few.cu"
_FEW_ROWS = 8  # at most
OPERANDS = (F32, F16, BF16)
MAX_SUM_RANK = 62
_GRID_LIMIT = 2**31 - 1  # blocks along x

# ColumnSumParams of column_sum.cu: two pointers, then sizes, strides, codes and the batch.
_POINTERS = struct.Struct("<2Q")
_FIELDS = struct.Struct(f"<6q4i{2 * MAX_SUM_RANK}q")


@dataclass(frozen=True, slots=True)
class SumTile:
    """How the kernel is built: its macros, and the columns, rows and stages that they mean. No stages:
    column_sum_few.cu, for any load and any number of rows."""

    load: Load
    columns: int
    rows: int
    stages: int
    loaders: int

    @property
    def threads(self) -> int:
        """Threads of a CTA: one a column, and those that copy."""
        return self.columns + self.loaders if self.stages else 256

    def shared_bytes(self, itemsize: int) -> int:
        """SMEM_BYTES in the head of the kernel file."""
        if self.load == Load.K_MAJOR:
            return self.stages * self.columns * (self.rows * itemsize + 16)
        line = self.columns * itemsize + (4 if self.load == Load.STRIDED else 0)
        return 16 * self.rows + self.stages * self.rows * line

    def __str__(self) -> str:
        return f"{self.columns} columns" + (f" x {self.rows} rows" if self.stages else "")


@dataclass(frozen=True, slots=True)
class SumLaunch:
    """A build of the kernel and the CTAs in a row that it is launched with."""

    tile: SumTile
    build: KernelBuild
    grid: int


def tiles_for(load: Load, operand: DType) -> tuple[SumTile, ...]:
    """The tiles of a load path, fewest columns first. Stages of vector loads hold 8 KiB, and seven of them are on their
    way while one is added: that much must be in flight to draw an SM's share of the memory's bandwidth."""
    if load == Load.STRIDED:
        return (SumTile(load, 32, 256, 2, 256),)
    narrow = SumTile(load, 32, 256 // operand.itemsize, 8, 128)
    return (narrow,) if load == Load.K_MAJOR else (narrow, SumTile(load, 64, 128 // operand.itemsize, 8, 128))


FEW = SumTile(Load.STRIDED, 1024, 0, 0, 0)
"""For at most _FEW_ROWS rows."""


def build_for(tile: SumTile, operand: DType) -> KernelBuild:
    """What is compiled for a tile and an operand type."""
    if not tile.stages:
        few = (("OPERAND", operand.code), ("TILE_N", tile.columns), ("THREADS", tile.threads))
        return KernelBuild(FEW_SOURCE, few, 0, f"bias_gradient {operand.short} {tile.columns} few")
    shared = tile.shared_bytes(operand.itemsize)
    macros = (
        ("OPERAND", operand.code),
        ("LOAD", int(tile.load)),
        ("TILE_N", tile.columns),
        ("ROWS", tile.rows),
        ("STAGES", tile.stages),
        ("LOADERS", tile.loaders),
        ("THREADS", tile.threads),
        ("SMEM_BYTES", shared),
    )
    name = f"bias_gradient {operand.short} {tile.columns}x{tile.rows} {tile.load.name[0]}"
    return KernelBuild(SOURCE, macros, shared, name)


def builds() -> list[KernelBuild]:
    """Every build that a launch may need, on any device."""
    tiles = [(operand, tile) for operand in OPERANDS for load in Load for tile in tiles_for(load, operand)]
    return [build_for(tile, operand) for operand, tile in tiles] + [build_for(FEW, operand) for operand in OPERANDS]


def load_path(problem: ColumnSumProblem) -> Load:
    """The fastest path that dc's strides and alignment allow. Strides along a size of 1 are 0 in a problem."""
    dc = problem.dc
    unit = 16 // dc.dtype.itemsize
    if dc.alignment == 16:
        if dc.col_stride == 1 and not any(stride % unit for stride in (dc.row_stride, *dc.batch_strides)):
            return Load.MN_MAJOR
        if dc.row_stride == 1 and not problem.batch and dc.col_stride % unit == 0:
            return Load.K_MAJOR
    return Load.STRIDED


def choose(problem: ColumnSumProblem, multiprocessors: int, tile: SumTile | None = None) -> SumLaunch:
    """The launch of a problem. Few columns are spread over as many multiprocessors as there are; where wider tiles fill
    them twice over, their longer runs of adjacent memory are read instead. tile: another one, for tests."""
    if tile is None and problem.m * math.prod(problem.batch) <= _FEW_ROWS:
        tile = FEW
    if tile is None:
        *narrower, tile = tiles_for(load_path(problem), problem.dc.dtype)
        if narrower and problem.n < 2 * multiprocessors * tile.columns:
            tile = narrower[0]
    grid = max(1, min(-(-problem.n // tile.columns), _GRID_LIMIT))
    return SumLaunch(tile, build_for(tile, problem.dc.dtype), grid)


def pack_params(problem: ColumnSumProblem) -> bytes:
    """ColumnSumParams after its pointers."""
    rows = problem.m
    for size in problem.batch:
        rows *= size
    padding = (0,) * (MAX_SUM_RANK - len(problem.batch))
    return _FIELDS.pack(
        rows, problem.m, problem.n,
        problem.dc.row_stride, problem.dc.col_stride, problem.out.stride,
        problem.out.dtype.code, int(problem.accumulate), len(problem.batch), 0,
        *problem.batch, *padding,
        *problem.dc.batch_strides, *padding,
    )  # fmt: skip


def _plan_for(problem: ColumnSumProblem, stream: int, chosen: SumLaunch | None = None) -> BlockPlan:
    device = describe(problem.device.index)
    if chosen is None:
        chosen = choose(problem, device.multiprocessors)
    function = load_function(device.index, device.capability, chosen.build, stream)
    params = pack_params(problem)
    return BlockPlan(problem, function.ptr, chosen.grid, chosen.tile.threads, chosen.build.shared_bytes, params)


def _head(operands: Operands, out: TensorView) -> bytes:
    (dc,) = operands
    assert dc is not None
    return _POINTERS.pack(dc.pointer, out.pointer)


def launch(
    problem: ColumnSumProblem,
    dc: TensorView,
    out: TensorView,
    execution: Execution,
    chosen: SumLaunch | None = None,
) -> None:
    """Enqueue the sums once, by a launch of the caller's. Raises as what `Sums.prepare` gives."""
    if problem.n > 0:
        plan_for = functools.partial(_plan_for, problem, execution.stream, chosen)
        block_launch.launch(problem, plan_for, _head((dc,), out), execution)


class Sums(CudaImplementation[ColumnSumProblem]):
    """The bias gradient. Binary32 addition is the same on all devices, but one on which it has not been compared with
    the replay is checked all the same, once."""

    def __init__(self) -> None:
        super().__init__(BIAS_GRADIENT, lambda variant: (SOURCE, FEW_SOURCE))

    def builds(self, capability: tuple[int, int]) -> list[KernelBuild]:
        return builds()

    def explain(self, problem: ColumnSumProblem) -> Kernel:
        chosen = choose(problem, describe(problem.device.index).multiprocessors)
        return Kernel(
            name=f"bias_gradient ({chosen.build.source})",
            tile=f"{chosen.tile}, {chosen.tile.stages} stages, dc {chosen.tile.load.label}"
            if chosen.tile.stages
            else str(chosen.tile),
            geometry=f"grid {chosen.grid}, {chosen.tile.threads} threads, {chosen.build.shared_bytes} bytes shared",
        )

    def prepare(self, problem: ColumnSumProblem, execution: Execution) -> Run:
        """What enqueues the sums. Nothing waits for the device, nothing is read back, no memory is taken: once the
        kernel has been loaded, the call can be captured into a graph."""
        return BlockRun(problem, _plan_for, _head)
