"""Sums of rows on CUDA by row_sums.cu: which rows are its own, its tiles, and the launches of a problem.

None of the choices here can change a bit: a sum is exact up to its one rounding, however a row is divided.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from ..operations.rows.problem import RowKind, RowProblem
from ..vocabulary.dtypes import BF16, F16, F32, DType
from .loader import KernelBuild

__all__ = ["SOURCE", "Phase", "SumLaunch", "SumTile", "builds", "choose", "pack_params", "tiles"]

SOURCE = "row_sums.cu"
MAX_SUM_RANK = 62
_GRID_LIMIT = 2**31 - 1  # blocks along x
_OPERANDS = (F32, F16, BF16)
_KINDS = (RowKind.SUM, RowKind.MEAN, RowKind.MEAN_SQUARE)
_MOST_COLUMNS = 1 << 18  # of a part: the sum of its terms stays within 64 bits
# From so many columns on a row is cut into parts, where rows are too few for the multiprocessors.
_LONG = 16384
_PART = 4096  # columns of a part, at least
_FINISHING = 256  # threads of FINISH, a warp a row

# RowSumParams of row_sums.cu after its pointers; the pointer to scratch memory comes last.
_FIELDS = struct.Struct(f"<8q4i{3 * MAX_SUM_RANK}q")
_NO_SCRATCH = bytes(8)


class Phase(IntEnum):
    """What a launch does of a sum; the values are those of PHASE in row_sums.cu."""

    WHOLE = 0
    LARGEST = 1
    TOTALS = 2
    FINISH = 3


@dataclass(frozen=True, slots=True)
class SumTile:
    """How the kernel is built: the macros of row_sums.cu. along: a thread's piece is of one row,
    else of neighbouring rows.
    vector: a piece is 16 bytes, else an element. across: pieces side by side (R). down: pieces of a row (C)."""

    along: bool
    vector: bool
    across: int
    down: int
    pieces: int
    held: bool

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.across * self.down

    def piece(self, operand: DType) -> int:
        """Elements of a load."""
        return 16 // operand.itemsize if self.vector else 1

    def rows(self, operand: DType) -> int:
        """Of a tile; ROWS in the kernel file."""
        return self.across * (1 if self.along else self.piece(operand))

    def columns(self, operand: DType) -> int:
        """That it has at one time; SLAB in the kernel file."""
        return self.down * self.pieces * (self.piece(operand) if self.along else 1)

    def __str__(self) -> str:
        where = "along" if self.along else "across"
        return f"{self.across} x {self.down} pieces of {'16 bytes' if self.vector else 'an element'} {where} rows"


@dataclass(frozen=True, slots=True)
class SumLaunch:
    """The launches of a problem: (build, grid, threads) one after the other, and the parts that a row is cut into."""

    tile: SumTile
    steps: tuple[tuple[KernelBuild, int, int], ...]
    parts: int
    part_columns: int

    def scratch_bytes(self, problem: RowProblem) -> int:
        """What the parts leave: their largest terms and their sums."""
        return 16 * self.parts * problem.m * prod(problem.batch) if len(self.steps) > 1 else 0


# In ascending order of the columns that they hold; the last ones of each kind hold none.
_ACROSS = tuple(
    SumTile(False, vector, *sizes)
    for vector in (True, False)
    for sizes in ((128, 1, 8, True), (32, 8, 4, True), (8, 32, 8, True), (4, 128, 8, True), (4, 128, 8, False))
)
_ALONG = tuple(
    SumTile(True, vector, *sizes) for vector in (True, False) for sizes in ((64, 4, 2, True), (16, 16, 4, True))
)
# Of parts of rows.
_CUT = tuple(
    SumTile(along, vector, *((1, 256, 4) if along else (4, 64, 8)), False)
    for along in (True, False)
    for vector in (True, False)
)


def tiles() -> tuple[SumTile, ...]:
    """Those that have whole rows."""
    return (*_ACROSS, *_ALONG)


def build_for(squares: bool, operand: DType, tile: SumTile, phase: Phase) -> KernelBuild:
    """What is compiled for a kind of terms, the operand's type, a tile and a phase."""
    macros = (
        ("SQUARES", int(squares)), ("OPERAND", operand.code), ("ALONG", int(tile.along)),
        ("PIECE", tile.piece(operand)),
        ("R", tile.across), ("C", tile.down), ("PIECES", tile.pieces), ("HELD", int(tile.held)), ("PHASE", int(phase)),
    )  # fmt: skip
    lies, held = "along" if tile.along else "across", " held" if tile.held else ""
    name = (
        f"{'mean_square' if squares else 'sum'} {operand.short} {tile.across}x{tile.down} {lies} {tile.piece(operand)}"
    )
    return KernelBuild(SOURCE, macros, 0, f"rows {name}{held} {phase.name.lower()}")


def _finishing() -> KernelBuild:
    return build_for(False, F32, SumTile(True, False, 1, _FINISHING, 1, False), Phase.FINISH)


def builds() -> list[KernelBuild]:
    """Every build that a launch may need."""
    found = [
        build_for(squares, operand, tile, phase)
        for squares in (False, True)
        for operand in _OPERANDS
        for phase, some in ((Phase.WHOLE, tiles()), (Phase.LARGEST, _CUT), (Phase.TOTALS, _CUT))
        for tile in some
    ]
    return [*found, _finishing()]


def _lies(problem: RowProblem) -> tuple[bool, bool]:
    """Whether pieces are of one row, and whether they are 16 bytes. Strides along a size of 1 are 0 in a problem."""
    a = problem.a
    along = problem.m == 1 or not 0 < abs(a.row_stride) < abs(a.col_stride)
    if along:
        return True, a.col_stride == 1 and a.aligned(a.row_stride)
    return False, a.row_stride == 1 and a.aligned(a.col_stride)


def choose(
    problem: RowProblem, multiprocessors: int, tile: SumTile | None = None, parts: int | None = None
) -> SumLaunch | None:
    """The launches of a sum; None where rows.cu computes it. tile, parts: others, for tests.

    Rows that lie side by side are this kernel's, short rows too; of other rows those that are so long and so few that
    multiprocessors would be idle.
    """
    if problem.kind not in _KINDS or problem.n == 0:
        return None
    along, vector = _lies(problem)
    operand, n = problem.a.dtype, problem.n
    rows = problem.m * prod(problem.batch)
    squares = problem.kind == RowKind.MEAN_SQUARE
    if tile is None and parts is None:
        fitting = [one for one in tiles() if (one.along, one.vector) == (along, vector)]
        tile = next((one for one in fitting if not one.held or n <= one.columns(operand)), None)
        busy = rows if along else _tiles_of_rows(problem, fitting[-1])
        if n > _MOST_COLUMNS or (n >= _LONG and busy < multiprocessors):
            tile, parts = None, 0
        elif tile is None:
            return None
    if tile is None:
        (tile,) = (one for one in _CUT if (one.along, one.vector) == (along, vector))
        count = _tiles_of_rows(problem, tile)
        least, most = -(-n // _MOST_COLUMNS), max(1, n // _PART)
        parts = parts or max(least, min(most, -(-3 * multiprocessors // count)))
        unit = tile.columns(operand) // tile.pieces
        columns = -(-n // (parts * unit)) * unit
        parts = -(-n // columns)
        grid = count * parts
        if grid > _GRID_LIMIT:
            return None
        step = [
            (build_for(squares, operand, tile, phase), grid, tile.threads) for phase in (Phase.LARGEST, Phase.TOTALS)
        ]
        last = (_finishing(), -(-rows // (_FINISHING // 32)), _FINISHING)
        return SumLaunch(tile, (*step, last), parts, columns)
    grid = min(_tiles_of_rows(problem, tile), _GRID_LIMIT)
    return SumLaunch(tile, ((build_for(squares, operand, tile, Phase.WHOLE), grid, tile.threads),), 1, n)


def _tiles_of_rows(problem: RowProblem, tile: SumTile) -> int:
    """Pieces of rows do not go from one batch index to the next."""
    each = 1 if tile.along else tile.piece(problem.a.dtype)
    return -(-(prod(problem.batch) * -(-problem.m // each)) // tile.across)


def pack_params(problem: RowProblem, launch: SumLaunch) -> bytes:
    """RowSumParams after its pointers; where scratch memory is used, its pointer follows."""
    padding = (0,) * (MAX_SUM_RANK - len(problem.batch))
    packed = _FIELDS.pack(
        problem.m * prod(problem.batch), problem.m, problem.n,
        problem.a.row_stride, problem.a.col_stride, problem.out.row_stride,
        launch.parts, launch.part_columns,
        problem.out.dtype.code, int(problem.kind != RowKind.SUM), len(problem.batch), 0,
        *problem.batch, *padding, *problem.a.batch_strides, *padding, *problem.out.batch_strides, *padding,
    )  # fmt: skip
    return packed if len(launch.steps) > 1 else packed + _NO_SCRATCH
