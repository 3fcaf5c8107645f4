"""Prefix sums of rows on CUDA by row_scans.cu: its builds, and the launches of a problem.

None of the choices here can change a bit: what a column holds is an exact sum, rounded once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from ..operations.rows.problem import RowKind, RowProblem
from ..vocabulary.dtypes import BF16, F16, F32, DType
from .loader import KernelBuild

__all__ = ["SOURCE", "THREADS", "Phase", "ScanLaunch", "builds", "choose", "pack_params"]

SOURCE = "row_scans.cu"
THREADS = 256
MAX_SUM_RANK = 62
_GRID_LIMIT = 2**31 - 1  # blocks along x
_OPERANDS = (F32, F16, BF16)
_TEAMS = {32: 4, THREADS: 8}  # threads of a row: columns of a thread at a time
_WARP_COLUMNS = 1024  # of a row that a warp has, at most
_PART = 8192  # columns of a part, at least

# RowScanParams of row_scans.cu after its pointers; the pointer to scratch memory comes last.
_FIELDS = struct.Struct(f"<11q2i{3 * MAX_SUM_RANK}q")
_NO_SCRATCH = bytes(8)


class Phase(IntEnum):
    """What a launch does; the values are those of PHASE in row_scans.cu."""

    SCAN = 0
    TOTALS = 1


@dataclass(frozen=True, slots=True)
class ScanLaunch:
    """The launches of a problem: (build, grid) one after the other, the threads of a row, and the parts that it is cut
    into."""

    steps: tuple[tuple[KernelBuild, int], ...]
    team: int
    parts: int
    part_columns: int

    def scratch_bytes(self, problem: RowProblem) -> int:
        """The sums of the parts: 320 bits and flags, or 96 of float16."""
        words = 4 if problem.a.dtype is F16 else 11
        return 4 * words * self.parts * problem.m * prod(problem.batch) if self.parts > 1 else 0

    def __str__(self) -> str:
        parts = f", {self.parts} parts a row" if self.parts > 1 else ""
        return f"{THREADS // self.team} x {self.team * _TEAMS[self.team]} columns{parts}"


def build_for(operand: DType, team: int, phase: Phase) -> KernelBuild:
    """What is compiled for the operand's type, the threads of a row and a phase."""
    macros = (("OPERAND", operand.code), ("TEAM", team), ("VALUES", _TEAMS[team]), ("PHASE", int(phase)))
    return KernelBuild(SOURCE, macros, 0, f"rows cumsum {operand.short} {team} {phase.name.lower()}")


def builds() -> list[KernelBuild]:
    """Every build that a launch may need."""
    forms = ((32, Phase.SCAN), (THREADS, Phase.SCAN), (THREADS, Phase.TOTALS))
    return [build_for(operand, team, phase) for operand in _OPERANDS for team, phase in forms]


def choose(problem: RowProblem, multiprocessors: int, team: int | None = None, parts: int | None = None) -> ScanLaunch:
    """The launches of a prefix sum. team, parts: others, for tests; only a team of THREADS has parts."""
    rows, n = problem.m * prod(problem.batch), problem.n
    if team is None:
        team = 32 if n <= _WARP_COLUMNS else THREADS
    slab = team * _TEAMS[team]
    if parts is None:
        parts = max(1, min(n // _PART, -(-2 * multiprocessors // rows))) if team == THREADS else 1
    columns = -(-n // (parts * slab)) * slab
    parts = -(-n // columns)
    grid = min(-(-rows * parts // (THREADS // team)), _GRID_LIMIT)
    phases = (Phase.TOTALS, Phase.SCAN) if parts > 1 else (Phase.SCAN,)
    return ScanLaunch(tuple((build_for(problem.a.dtype, team, phase), grid) for phase in phases), team, parts, columns)


def pack_params(problem: RowProblem, launch: ScanLaunch) -> bytes:
    """RowScanParams after its pointers; where scratch memory is used, its pointer follows."""
    padding = (0,) * (MAX_SUM_RANK - len(problem.batch))
    back = problem.kind == RowKind.CUMSUM_BACKWARD  # from the last column on
    a, out, last = problem.a, problem.out, problem.n - 1
    packed = _FIELDS.pack(
        problem.m * prod(problem.batch), problem.m, problem.n,
        *((last * a.col_stride, a.row_stride, -a.col_stride) if back else (0, a.row_stride, a.col_stride)),
        *((last * out.col_stride, out.row_stride, -out.col_stride) if back else (0, out.row_stride, out.col_stride)),
        launch.parts, launch.part_columns, out.dtype.code, len(problem.batch),
        *problem.batch, *padding, *a.batch_strides, *padding, *out.batch_strides, *padding,
    )  # fmt: skip
    return packed if launch.parts > 1 else packed + _NO_SCRATCH
