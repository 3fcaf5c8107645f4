"""Which tile computes a problem, and the launch that follows from it. None of it can change a bit.

The tables are tiles/<kernel>.json, one object a tile: its macros; `loads`, the load paths of A and B that it is built for
("any", "vector": without gathering, or a list such as "KM": K_MAJOR and MN_MAJOR); `wave_us`, the time of 4096 k when every
multiprocessor holds CTAS_PER_SM CTAs, and `alone_us`, when it holds one, on an H200 (`python -m benchmarks.cuda_gemm
--tiles`); and the operand types it is for, where not for all. Tiles of mma_wgmma.json are chosen by time_model.py instead,
whose numbers are in tiles/time_model.json; wave_us of fma_narrow.json is a model (docs/hopper.md). Each kernel file says in its
head what its macros mean and how much shared memory and scratch they need; those formulas are repeated here. Of the other
kernels, what was measured on whole shapes goes before what wave_us predicts (tuned.py).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DeviceError
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from ..vocabulary.contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from ..vocabulary.dtypes import DType, by_name
from . import time_model
from .loader import KernelBuild
from .tensor_map import BOX_WIDTH, SIZE_LIMIT, MapShape, available, map_shapes, out_pairs, output_map_shape
from .tuned import labels

__all__ = [
    "Chooser",
    "Launch",
    "Load",
    "Maps",
    "Tile",
    "build_for",
    "candidates",
    "choose",
    "fits",
    "launch_for",
    "load_paths",
    "model_shapes",
    "oriented",
    "portable_sources",
    "predicted_us",
    "shared_limit",
    "source_of",
    "takes",
    "tiles_for",
]

_TABLES = Path(__file__).parent / "tiles"
_TABLE_OF = {FMA: "fma", MMA16: "mma", MMA8: "mma", TREE: "tree", TREE_MMA16: "tree_mma"}
# Kernels that a contract has besides, on every device or on one generation of them, by its compute capability.
_TABLES_BESIDES = {FMA: ("fma_narrow",), MMA16: ("mma_wgmma",), TREE_MMA16: ("tree_wgmma",)}
_CAPABILITY_OF = {"mma_wgmma": (9, 0), "tree_wgmma": (9, 0)}
_MODELLED = "mma_wgmma"  # whose tiles time_model.py chooses
# Those whose operands come by TMA, and whose CTAs walk over the tiles.
_BY_TMA = frozenset(("mma_wgmma", "tree_wgmma"))
# Levels of a tree that a kernel keeps there: of nodes of four leaves, or by wgmma of eight and one that waits for its sibling.
_LEVELS_IN_REGISTERS = {"tree": 0, "tree_mma": 2, "tree_wgmma": 4}
# Of B, that a CTA asks the L2 cache for ahead: a multiple of so many bytes. And the columns a multiprocessor below which a
# chain takes longer than memory.
_PREFETCH_UNIT = 32 * 1024
_COLUMNS_OF_A_CHAIN = 12
# `Shared` of pipeline.cuh.
SHARED_A, SHARED_B = 1, 2
_GRID_LIMIT = 2**31 - 1  # blocks along x
_BYTES_PER_US = 4.3e6  # from an H200's memory
_SMALLEST_TILE = 16 * 8
_EACH_M = 64  # up to here a tile is chosen for every m
# What a tile takes longer where lines are not of whole 128 bytes: each row of a box lies in two of the L2's lines.
_BROKEN_LINES = 1.6

# Dynamic shared memory that one CTA may ask for, in bytes (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability": the maximum per thread block). A capability that is not listed has that of the last one before it.
_SHARED_LIMIT = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}


class Load(IntEnum):
    """How an operand's tile comes from global memory: `Load` of params.cuh."""

    STRIDED = 0
    K_MAJOR = 1
    MN_MAJOR = 2

    @property
    def label(self) -> str:
        """For people."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class Tile:
    """One row of a tile table.

    macros:  (name, value) pairs that the kernel is compiled with.
    operands: the types it is for; none: all that the contract takes.
    loads:   the pairs of load paths that it is built for.
    wave_us, alone_us: of 4096 k with a multiprocessor full of CTAs, and with one on it; 0 where time_model.py predicts.
    fills:   whole boxes of A are copied where there are fewer rows, too: one copy a stage, which brings zeros as well.
    """

    table: str
    macros: tuple[tuple[str, int], ...]
    operands: tuple[DType, ...]
    loads: frozenset[tuple[Load, Load]]
    wave_us: float
    alone_us: float
    fills: bool = False

    @functools.cached_property
    def _values(self) -> dict[str, int]:
        return dict(self.macros)

    def __getitem__(self, macro: str) -> int:
        return self._values[macro]

    def get(self, macro: str, default: int) -> int:
        """A macro that not all kernels have."""
        return self._values.get(macro, default)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        if self.table == "tree_wgmma":
            return 128 * (self["GROUPS_M"] * self["GROUPS_N"] + 1)
        return 32 * (self["WARPS_M"] * self["WARPS_N"] + self.get("COPYING_WARPS", 0))

    @property
    def shares(self) -> int:
        """The operand that the two CTAs of a cluster share: 0, SHARED_A or SHARED_B."""
        return self._values.get("SHARES", 0)

    @property
    def swapped(self) -> bool:
        """Whether its kernel computes the transpose: the rows of a tile are columns of the output."""
        return self._values.get("SWAPPED", 0) == 1

    @property
    def f32_out(self) -> bool:
        """Whether its kernel writes binary32 outputs in rows of pairs and no others."""
        return self._values.get("F32_OUT", 0) == 1

    @property
    def by_tma(self) -> bool:
        """Whether its kernel takes the operands as tensor maps."""
        return self.table in _BY_TMA

    @property
    def stores_by_tma(self) -> bool:
        """Whether its kernel takes a tensor map of a 16-bit output whose rows are contiguous (and writes it well)."""
        return self.table == "mma_wgmma"

    def __str__(self) -> str:
        size = f"{self['TILE_M']}x{self['TILE_N']}x{self['TILE_K']}"
        if not self.by_tma:
            return size
        words = [f"{size}x{self['STAGES']}"]
        words += [["a shared"], ["b shared"]][self.shares - 1] if self.shares else []
        words += ["swapped"] if self.swapped else []
        words += ["f32"] if self.f32_out else []
        words += ["in turn"] if self.get("IN_TURN", 0) else []
        words += ["filled"] if self.fills else []
        words += [f"{self['CTAS_PER_SM']} an SM"] if self["CTAS_PER_SM"] > 1 else []
        return " ".join(words)


# Not frozen, here and where plans are made: a frozen dataclass costs three times as much to make. Nobody changes one.
@dataclass(slots=True)
class Maps:
    """What TMA is told of the operands, and of the output where it writes that too."""

    a: MapShape
    b: MapShape
    out: MapShape | None

    @property
    def whole_boxes(self) -> int:
        """GemmParams::whole_boxes: bit 0 for a, bit 1 for b."""
        return int(self.a.boxes is not None) | int(self.b.boxes is not None) << 1


@dataclass(slots=True)
class Launch:
    """A kernel and how it is launched: `grid` CTAs in a row, of `threads` threads, in clusters of `cluster`. maps: where the
    kernel takes them. prefetch_bytes: of B, that each CTA asks the L2 cache for while the grid before still ends."""

    tile: Tile
    build: KernelBuild
    load_a: Load
    load_b: Load
    grid: int
    threads: int
    scratch_bytes: int
    cluster: int = 1
    maps: Maps | None = None
    prefetch_bytes: int = 0


def _loads(text: str | list[str]) -> frozenset[tuple[Load, Load]]:
    if isinstance(text, str):
        text = [a + b for a in "SKM" for b in "SKM" if text == "any" or "S" not in a + b]
    return frozenset((_LETTERS[pair[0]], _LETTERS[pair[1]]) for pair in text)


_LETTERS = {"S": Load.STRIDED, "K": Load.K_MAJOR, "M": Load.MN_MAJOR}


@functools.cache
def _table(name: str) -> tuple[Tile, ...]:
    rows = json.loads((_TABLES / f"{name}.json").read_text())
    result = []
    for row in rows:
        operands = tuple(dtype for dtype in map(by_name, row.pop("operands", ())) if dtype)
        loads, wave = _loads(row.pop("loads")), row.pop("wave_us", 0.0)
        alone, fills = row.pop("alone_us", wave), row.pop("fills", False)
        result.append(Tile(name, tuple(row.items()), operands, loads, wave, alone, fills))
    return tuple(result)


@functools.cache
def tiles_for(contract: Contract, operand: DType) -> tuple[Tile, ...]:
    """Every tile that computes `contract` on operands of that type, in the tables' order."""
    rows = [tile for name in (*_TABLES_BESIDES.get(contract, ()), _TABLE_OF[contract]) for tile in _table(name)]
    return tuple(tile for tile in rows if not tile.operands or operand in tile.operands)


def source_of(contract: Contract) -> str:
    """The kernel file that computes `contract` on every device, whatever the load paths; there may be others besides."""
    return f"{_TABLE_OF[contract]}.cu"


def portable_sources(contract: Contract) -> tuple[str, ...]:
    """The kernel files that compute `contract` on every device: that of `source_of`, and those besides."""
    besides = (name for name in _TABLES_BESIDES.get(contract, ()) if name not in _CAPABILITY_OF)
    return source_of(contract), *(f"{name}.cu" for name in besides)


def _shared_bytes(tile: Tile) -> int:
    """SMEM_BYTES in the head of the kernel file."""
    m, n, k, stages = (tile[name] for name in ("TILE_M", "TILE_N", "TILE_K", "STAGES"))
    if tile.table == "fma_narrow":
        needed = stages * (m + n) * (4 * k + 16)
    elif tile.table in ("fma", "tree"):
        needed = 4 * stages * k * (m + n)
    elif tile.table == "tree_wgmma":
        levels = max(_level_bytes(tile) // 4 + tile["SHARED_LEVELS"] * _level_bytes(tile), 160 * m * tile["GROUPS_N"])
        return 2 * stages * k * (m + n) + levels + 16 * stages + 1024
    elif tile.table == "mma_wgmma":
        slab = 64 * (_slab_columns(n, 32) + 8)  # of binary32 outputs
        if tile.swapped:
            slab = 32 * n
        elif n % 64 == 0:
            slab = -(-max(slab, 2048 * tile["SLAB_BOXES"]) // 1024) * 1024
        else:
            slab = max(slab, 16 * (2 * min(n, 32) + 16))
        consuming_warps = 4 * -(-m // tile["GROUP_M"]) * (2 if tile["IN_TURN"] else 1)
        return 2 * stages * k * (m + n) + consuming_warps * slab + 16 * stages + 1024
    else:
        needed = max(2 * stages * k * (m + n), tile["WARPS_M"] * tile["WARPS_N"] * 64 * (n // tile["WARPS_N"] + 8))
    if tile.table in ("tree", "tree_mma"):
        needed += tile["SHARED_LEVELS"] * _level_bytes(tile)
    return needed


def _slab_columns(columns: int, limit: int) -> int:
    """The largest multiple of 8, at most `limit`, that divides `columns`; at least 8."""
    return next((width for width in range(limit, 8, -8) if columns % width == 0), 8)


def _scratch_bytes(tile: Tile, k: int, grid: int) -> int:
    """GemmParams::scratch: a slot a CTA with the levels of a tree that do not fit its shared memory."""
    if tile.table not in _LEVELS_IN_REGISTERS:
        return 0
    leaves = -(-k // 32)
    levels = (max(leaves, 1) - 1).bit_length()  # the ceiling of log2
    outside = levels - _LEVELS_IN_REGISTERS[tile.table] - tile["SHARED_LEVELS"]
    return grid * max(0, outside) * _level_bytes(tile)


def _level_bytes(tile: Tile) -> int:
    """One 16-bit value an output of the tile."""
    return 2 * tile["TILE_M"] * tile["TILE_N"]


@functools.cache
def build_for(contract: Contract, operand: DType, tile: Tile, load_a: Load, load_b: Load) -> KernelBuild:
    """What is compiled for a tile, an operand type and the load paths of a and b."""
    shared = _shared_bytes(tile)
    name = f"gemm {contract} {operand.short} {tile} {load_a.name[0]}{load_b.name[0]} {tile.table}"
    if tile.swapped:
        load_a, load_b = load_b, load_a
    macros = [("OPERAND", operand.code), ("LOAD_A", int(load_a)), ("LOAD_B", int(load_b)), *tile.macros]
    if contract in (MMA16, MMA8):
        macros.append(("MMA_K", 16 if contract == MMA16 else 8))
    if tile.table in ("fma", "fma_narrow", "tree"):
        macros.append(("THREADS", tile.threads))
    macros.append(("SMEM_BYTES", shared))
    return KernelBuild(f"{tile.table}.cu", tuple(macros), shared, name)


def shared_limit(capability: tuple[int, int]) -> int:
    """The dynamic shared memory that one CTA may have, in bytes."""
    return _SHARED_LIMIT[max(key for key in _SHARED_LIMIT if key <= capability)]


@functools.cache
def fits(tile: Tile, capability: tuple[int, int]) -> bool:
    """Whether a device of that capability has the instructions and the shared memory that the tile needs."""
    return _CAPABILITY_OF.get(tile.table, capability) == capability and _shared_bytes(tile) <= shared_limit(capability)


def _load_path(matrix: Matrix, mn_stride: int, k_stride: int) -> Load:
    """The fastest path that an operand's strides and alignment allow. Strides along a size of 1 are 0 in a problem."""
    unit = 16 // matrix.dtype.itemsize
    if matrix.alignment < 16 or any(stride % unit for stride in matrix.batch_strides):
        return Load.STRIDED
    if k_stride == 1 and mn_stride % unit == 0:
        return Load.K_MAJOR
    if mn_stride == 1 and k_stride % unit == 0:
        return Load.MN_MAJOR
    return Load.STRIDED


def load_paths(problem: GemmProblem) -> tuple[Load, Load]:
    """The load paths of a and b."""
    a, b = problem.a, problem.b
    return (
        _load_path(a, a.row_stride, a.col_stride),
        _load_path(b, b.col_stride, b.row_stride),
    )


@functools.lru_cache(maxsize=8)
def _transposed(problem: GemmProblem) -> GemmProblem:
    """out.T = b.T @ a.T, whose bits are out's."""

    def turned(matrix: Matrix) -> Matrix:
        return replace(matrix, row_stride=matrix.col_stride, col_stride=matrix.row_stride)

    return replace(problem, m=problem.n, n=problem.m, a=turned(problem.b), b=turned(problem.a), out=turned(problem.out))


def oriented(problem: GemmProblem, tile: Tile) -> GemmProblem:
    """The problem as the tile's kernel has it: a swapped tile's is the transpose, but for the bias, which goes by rows then."""
    return _transposed(problem) if tile.swapped else problem


def _along(size: int, unit: int, pairs: bool) -> int:
    """Tiles of `unit` along a size. pairs: they are in clusters of two, the second of which may be outside."""
    return -(-size // (2 * unit)) * 2 if pairs else -(-size // unit)


def _tile_count(problem: GemmProblem, tile: Tile) -> int:
    """The CTAs that the tiles would occupy, those of a cluster's tiles that are outside the output too. problem: oriented."""
    count = _along(problem.m, tile["TILE_M"], tile.shares == SHARED_B)
    return count * _along(problem.n, tile["TILE_N"], tile.shares == SHARED_A) * math.prod(problem.batch)


def _has_rows_to_share(problem: GemmProblem, tile: Tile) -> bool:
    """Whether there is a whole tile of rows, where the CTAs of a cluster copy parts of tiles for one another: boxes of A
    have no more rows than there are, and parts of such boxes are none that the kernel knows."""
    return not tile.shares or problem.m >= tile["TILE_M"]


def launch_for(
    problem: GemmProblem, tile: Tile, multiprocessors: int, loads: tuple[Load, Load] | None = None
) -> Launch:
    """The launch of a given tile. loads: slower paths than the operands allow, for tests."""
    return _Fitted(problem, tile, multiprocessors, loads or load_paths(problem)).launch(problem)


class _Fitted:
    """A tile for the products of one layout: what does not depend on m is worked out once, so that an m that was never seen
    costs little."""

    __slots__ = (
        "_alone_to", "_build", "_least", "_loads", "_maps", "_most", "_others", "_prefetch", "_read", "_scratch", "_threads", "_tile",
        "_unit",
    )  # fmt: skip

    def __init__(self, problem: GemmProblem, tile: Tile, multiprocessors: int, loads: tuple[Load, Load]) -> None:
        self._tile, self._loads = tile, loads
        self._build = build_for(problem.contract, problem.a.dtype, tile, *loads)
        self._maps = _FittedMaps(problem, tile, *loads) if tile.by_tma else None
        self._threads = tile.threads
        self._scratch = _scratch_bytes(tile, problem.k, 1)
        # Of the tile along the caller's m, and tiles along all else.
        rows, columns = (tile["TILE_M"], tile.shares == SHARED_B), (tile["TILE_N"], tile.shares == SHARED_A)
        self._unit, across = (columns, rows) if tile.swapped else (rows, columns)
        self._others = _along(problem.n, *across) * math.prod(problem.batch)
        # Where scratch is a slot a CTA, or the loads of the next tile begin before the last one is written, no more CTAs than
        # run at once, each of which walks over several tiles.
        walks = tile.by_tma or self._scratch > 0
        self._most = multiprocessors * tile["CTAS_PER_SM"] if walks else _GRID_LIMIT
        self._least, self._alone_to = self._rows(problem.n, tile)
        self._prefetch, self._read = _prefetch_bytes(problem, tile, multiprocessors)

    @staticmethod
    def _rows(n: int, tile: Tile) -> tuple[float, float]:
        """The least m that the tile takes, and the largest for which its CTAs are in no clusters of two. Two run on a pair of
        multiprocessors; of tiles below one another, which are launched one behind the other, what they read of B comes faster
        there, whether the kernel knows of it or not."""
        least = tile["TILE_M"] if tile.shares else 0
        alone = -1 if tile.shares else tile["TILE_M"] if tile.table == "mma_wgmma" else math.inf
        if tile.swapped:  # n are the rows of its kernel
            return (0 if n >= least else math.inf), (math.inf if n <= alone else -1)
        return least, alone

    def launch(self, problem: GemmProblem) -> Launch:
        """Of a problem of the layout."""
        tile, m = self._tile, problem.m
        maps = None if self._maps is None else self._maps.of(problem)
        if m < self._least:
            raise DeviceError(
                f"tile {tile} copies parts of whole tiles of rows, and {oriented(problem, tile)} has fewer"
            )
        cluster = 2 if m > self._alone_to else 1
        unit, pairs = self._unit
        count = self._others * (-(-m // (2 * unit)) * 2 if pairs else -(-m // unit))
        grid = cluster * max(1, min(-(-count // cluster), self._most // cluster))
        prefetch = self._prefetch
        if self._read and m <= unit:
            prefetch *= min(4, -(-self._read * -(-count // grid) // (4 * _PREFETCH_UNIT)))
        return Launch(
            tile, self._build, *self._loads, grid, self._threads, self._scratch * grid, cluster, maps, prefetch
        )


def _prefetch_bytes(problem: GemmProblem, tile: Tile, multiprocessors: int) -> tuple[int, int]:
    """Launch.prefetch_bytes at least, and what a CTA reads of B for each of its tiles, where it asks for a quarter of that, up to
    128 KiB (docs/hopper.md), or 0. 32 KiB where other CTAs ask for the same columns, as they do for more rows than a tile has, and
    where a chain takes longer than memory: its first operands come behind the rest."""
    if tile.table != "mma_wgmma" or problem.batch:
        return 0, 0
    if tile.swapped or tile.shares or problem.n < _COLUMNS_OF_A_CHAIN * multiprocessors:
        return _PREFETCH_UNIT, 0
    return _PREFETCH_UNIT, 2 * problem.k * tile["TILE_N"]


def takes(problem: GemmProblem, tile: Tile, loads: tuple[Load, Load]) -> bool:
    """Whether a tile's kernel can compute the problem on these load paths."""
    if loads not in tile.loads:
        return False
    if tile.table == _MODELLED and not _writes(tile, out_pairs(problem), output_map_shape(problem) is not None):
        return False
    if tile.by_tma and not (available() and map_shapes(problem, _along_k(loads)) is not None):
        return False
    problem = oriented(problem, tile)
    # Boxes of a swapped tile's tokens are whole.
    if not _has_rows_to_share(problem, tile) or (tile.swapped and problem.n < tile["TILE_N"]):
        return False
    return not tile.by_tma or _tile_count(problem, tile) <= _GRID_LIMIT


def _writes(tile: Tile, pairs: bool, mapped: bool) -> bool:
    """Whether a tile of mma_wgmma.json writes outputs that are pairs of binary32, that have a tensor map, or neither."""
    return pairs if tile.f32_out else not pairs and bool(tile["STRIDED_OUT"] or mapped)


def _along_k(loads: tuple[Load, Load]) -> tuple[bool, bool]:
    return loads[0] == Load.K_MAJOR, loads[1] == Load.K_MAJOR


class _FittedMaps:
    """The maps of a tile for the products of one layout. Where the lines of a run along k, and so m of them lie below one another
    as in the output, only their number changes with m. b's map is one for all, and keeps what the driver made of it."""

    __slots__ = ("_a", "_b", "_by_lines", "_few", "_loads", "_out", "_tile")

    def __init__(self, problem: GemmProblem, tile: Tile, load_a: Load, load_b: Load) -> None:
        self._tile, self._loads = tile, (load_a, load_b)
        made = _maps(problem, tile, load_a, load_b)
        self._a, self._b = (made.b, made.a) if tile.swapped else (made.a, made.b)
        self._out, self._few = made.out, 0
        self._by_lines = load_a == Load.K_MAJOR and problem.m > 1
        if self._by_lines and not tile.swapped:
            self._a = _operand_map(self._a, tile["TILE_K"], tile["TILE_M"], load_a, None, tile.shares == SHARED_A)
            if not (tile.fills and self._a.whole):
                self._few = tile["TILE_M"]

    def of(self, problem: GemmProblem) -> Maps:
        """Of a problem of the layout."""
        m = problem.m
        if not (self._by_lines and 1 < m <= SIZE_LIMIT):
            return _maps(problem, self._tile, *self._loads)
        # Boxes of a have no more rows than there are.
        a = self._a.with_lines(m) if m >= self._few else self._a.with_lines(m, rows=m)
        out = None if self._out is None else self._out.with_lines(m)
        return Maps(self._b, a, out) if self._tile.swapped else Maps(a, self._b, out)


def _maps(problem: GemmProblem, tile: Tile, load_a: Load, load_b: Load) -> Maps:
    """The tensor maps with the tile's boxes, of the operands as the kernel has them."""
    shapes = map_shapes(problem, _along_k((load_a, load_b)))
    if shapes is None:
        raise DeviceError(f"TMA cannot describe the operands of {problem}")
    out = output_map_shape(problem) if tile.stores_by_tma else None
    if tile.swapped:
        shapes, load_a, load_b = shapes[::-1], load_b, load_a
    present = None if tile.fills and shapes[0].whole else oriented(problem, tile).m
    return Maps(
        a=_operand_map(shapes[0], tile["TILE_K"], tile["TILE_M"], load_a, present, tile.shares == SHARED_A),
        b=_operand_map(shapes[1], tile["TILE_K"], tile["TILE_N"], load_b, None, tile.shares == SHARED_B),
        out=None if out is None else replace(out, rows=tile["TILE_N"] if tile.swapped else 16),
    )


def _operand_map(shape: MapShape, tile_k: int, tile_mn: int, load: Load, present: int | None, halves: bool) -> MapShape:
    """The map with a tile's boxes. present: rows that there are, where copying those outside would take time. halves: each
    CTA of a cluster copies half of the boxes, or of a single box half of the rows."""
    along, rows = (tile_k, tile_mn) if load == Load.K_MAJOR else (tile_mn, tile_k)
    if load == Load.K_MAJOR and present is not None and present < rows:
        return replace(shape, rows=present)
    boxes = along // BOX_WIDTH
    if halves:
        boxes, rows = (boxes // 2, rows) if boxes > 1 else (1, rows // 2)
    return replace(shape, rows=rows, boxes=boxes if shape.whole else None)


def _broken(matrix: Matrix) -> bool:
    """Whether the lines of an operand start at other distances than multiples of 128 bytes."""
    stride = max(abs(matrix.row_stride), abs(matrix.col_stride))
    return stride > 1 and stride * matrix.dtype.itemsize % 128 != 0  # 1: there is one line


class _Layout(NamedTuple):
    """What time_model.py and the load paths need of a problem besides m. by_tma: whether TMA can describe the operands. pairs,
    mapped: of the output, as `_writes` asks."""

    operand: DType
    n: int
    k: int
    batch: int
    loads: tuple[Load, Load]
    broken: tuple[bool, bool]
    by_tma: bool
    pairs: bool
    mapped: bool
    f32: bool
    accumulate: bool


def _layout(problem: GemmProblem, loads: tuple[Load, Load]) -> _Layout:
    return _Layout(
        problem.a.dtype,
        problem.n,
        problem.k,
        math.prod(problem.batch),
        loads,
        (_broken(problem.a), _broken(problem.b)),
        available() and map_shapes(problem, _along_k(loads)) is not None,
        out_pairs(problem),
        output_map_shape(problem) is not None,
        problem.out.dtype.itemsize == 4,
        problem.accumulate,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Modelled:
    """Tiles that time_model.py can choose from, what it knows of them, and the least m that each of them takes."""

    tiles: tuple[Tile, ...]
    prepared: time_model.Prepared
    least: np.typing.NDArray[np.float64]
    always: int  # m that all of them take


@functools.lru_cache(maxsize=512)
def _modelled(layout: _Layout, capability: tuple[int, int], multiprocessors: int) -> _Modelled | None:
    """The tiles of mma_wgmma.json for products of that layout, whatever m; None where there are none."""
    found = []
    for tile in _table(_MODELLED) if layout.by_tma else ():
        rows = layout.n if tile.swapped else tile["TILE_M"]
        if (
            layout.loads in tile.loads
            and _writes(tile, layout.pairs, layout.mapped)
            and fits(tile, capability)
            and (not tile.shares or rows >= tile["TILE_M"])
        ):
            found.append(tile)
    if not found:
        return None
    # A swapped tile's tokens are whole boxes, and CTAs that share an operand copy parts of whole tiles.
    shapes = model_shapes(found)
    least = np.where(shapes.swapped, shapes.columns, np.where(shapes.share > 0, shapes.rows, 0.0))
    return _Modelled(tuple(found), _prepared(found, layout, multiprocessors), least, int(least.max()))


def model_shapes(tiles: Sequence[Tile]) -> time_model.TileShapes:
    """What time_model.py knows of tiles of mma_wgmma.json."""

    def each(macro: str) -> np.typing.NDArray[np.float64]:
        return np.array([tile.get(macro, 0) for tile in tiles], dtype=np.float64)

    return time_model.TileShapes(
        rows=each("TILE_M"),
        columns=each("TILE_N"),
        stage_k=each("TILE_K"),
        share=each("SHARES"),
        band=each("BAND"),
        swapped=np.array([tile.swapped for tile in tiles]),
        fills=np.array([tile.fills for tile in tiles]),
    )


def _prepared(tiles: Sequence[Tile], layout: _Layout, multiprocessors: int) -> time_model.Prepared:
    product = time_model.Product(
        layout.n, layout.k, _along_k(layout.loads), layout.broken, layout.f32, layout.accumulate, layout.batch
    )
    numbers = time_model.numbers(tuple(map(str, tiles)))
    return time_model.prepare(model_shapes(tiles), numbers, product, multiprocessors)


def predicted_us(problem: GemmProblem, tile: Tile, multiprocessors: int) -> float:
    """A time to compare tiles of one table by: time_model.py's where that knows the kernel. Else by the table: full waves of
    CTAs, then what is left on the multiprocessors; no less than the operands take from memory."""
    if tile.table == _MODELLED:
        layout = _layout(problem, load_paths(problem))
        return float(time_model.times_us(_prepared((tile,), layout, multiprocessors), problem.m)[0])
    at_once = tile["CTAS_PER_SM"]
    waves, left = divmod(_tile_count(problem, tile), multiprocessors * at_once)
    time = waves * tile.wave_us
    if left:
        on_one = -(-left // multiprocessors)
        more = (tile.wave_us - tile.alone_us) * (on_one - 1) / (at_once - 1) if on_one > 1 else 0.0
        time += tile.alone_us + more
    time *= problem.k / 4096
    if tile.by_tma and (_broken(problem.a) or _broken(problem.b)):
        time *= _BROKEN_LINES
    batch = math.prod(problem.batch)
    elements = batch * (problem.m * problem.k + problem.n * problem.k + problem.m * problem.n)
    from_memory = elements * problem.a.dtype.itemsize / _BYTES_PER_US
    # Of tiles that all wait for memory, the one that leaves most room is taken.
    return max(time, from_memory) + 0.05 * time


def candidates(problem: GemmProblem, capability: tuple[int, int], loads: tuple[Load, Load]) -> list[Tile]:
    """The tiles whose kernels can compute the problem on a device of that capability."""
    return [
        tile
        for tile in tiles_for(problem.contract, problem.a.dtype)
        if fits(tile, capability) and takes(problem, tile, loads)
    ]


@functools.lru_cache(maxsize=2048)
def _fastest(found: _Modelled, group: int) -> list[Tile | None]:
    """The tiles that time_model.py predicts to be fastest, of those that take the rows, for `_AT_ONCE` choices (`_choice`), which
    take four times as long as one. None where there are none."""
    first = group * _AT_ONCE
    whole, rows = zip(*map(_rows_of_choice, range(first, first + _AT_ONCE)), strict=True)
    times = time_model.times_us_of_each(found.prepared, rows)
    if whole[0] < found.always:
        times[np.array(whole)[:, None] < found.least] = np.inf
    places = times.argmin(1)
    return [
        found.tiles[place] if math.isfinite(us) else None
        for place, us in zip(places.tolist(), times[_EACH_CHOICE, places].tolist(), strict=True)
    ]


# Choices by the model are numbered: up to _EACH_M there is one for every m, from there on one for each multiple of 8 and one for
# what is between two of them, since sides of tiles are multiples of 8.
_AT_ONCE = 32
_EACH_CHOICE = np.arange(_AT_ONCE)


def _choice(m: int) -> int:
    return m if m <= _EACH_M else 2 * (m // 8) + (m % 8 > 0) + _EACH_M - _EACH_M // 4


def _rows_of_choice(number: int) -> tuple[int, int]:
    """The rows that there are at least, and those that the time is predicted for."""
    if number <= _EACH_M:
        return max(number, 1), max(number, 1)
    eighths, between = divmod(number - _EACH_M + _EACH_M // 4, 2)
    return 8 * eighths, 8 * (eighths + between)


class Chooser:
    """`choose` for the products of one layout, which differ in m alone: what else a choice needs is worked out once."""

    __slots__ = (
        "_by_lines", "_capability", "_fitted", "_loads", "_modelled", "_most", "_multiprocessors", "_of_model"
    )  # fmt: skip

    def __init__(self, problem: GemmProblem, capability: tuple[int, int], multiprocessors: int) -> None:
        self._capability, self._multiprocessors = capability, multiprocessors
        self._loads = load_paths(problem)
        self._fitted: dict[int, _Fitted] = {}
        self._of_model = (
            problem.contract == MMA16 and Load.STRIDED not in self._loads and _CAPABILITY_OF[_MODELLED] == capability
        )
        # The most rows that tiles are chosen for by the model.
        self._most = _SMALLEST_TILE * _GRID_LIMIT // max(math.prod(problem.batch) * problem.n, 1)
        # What the model asks of a layout depends on m where a's lines run along it, and where there is one of them.
        self._by_lines = self._loads[0] == Load.K_MAJOR and problem.m > 1
        self._modelled = self._model(problem) if self._of_model and self._by_lines else None

    def __call__(self, problem: GemmProblem) -> Launch:
        """As `choose`, of a problem of the layout."""
        tile = (self._fastest_modelled(problem) if self._of_model else None) or self._fastest_measured(problem)
        fitted = self._fitted.get(id(tile))
        if fitted is None:
            fitted = self._fitted[id(tile)] = _Fitted(problem, tile, self._multiprocessors, self._loads)
        return fitted.launch(problem)

    def _model(self, problem: GemmProblem) -> _Modelled | None:
        return _modelled(_layout(problem, self._loads), self._capability, self._multiprocessors)

    def _fastest_modelled(self, problem: GemmProblem) -> Tile | None:
        """The tile of mma_wgmma.json that time_model.py predicts to be fastest; None where none can compute the problem."""
        m = problem.m
        if m > self._most:
            able = [tile for tile in candidates(problem, self._capability, self._loads) if tile.table == _MODELLED]
            return min(able, key=lambda tile: predicted_us(problem, tile, self._multiprocessors), default=None)
        found = self._modelled if self._by_lines and 1 < m <= SIZE_LIMIT else self._model(problem)
        if found is None:
            return None
        group, place = divmod(_choice(m), _AT_ONCE)
        return _fastest(found, group)[place]

    def _fastest_measured(self, problem: GemmProblem) -> Tile:
        """Of the other kernels."""
        tiles = [tile for tile in candidates(problem, self._capability, self._loads) if tile.table != _MODELLED]
        if not tiles:
            capability = "{}.{}".format(*self._capability)
            raise DeviceError(
                f"no tile of {problem.contract} fits the shared memory of compute capability {capability}"
            )
        if not problem.batch:
            names = "".join(load.name[0] for load in self._loads)
            known = labels(problem.contract.name, names, problem.m, problem.n, problem.k, self._multiprocessors)
            tiles = [tile for tile in tiles if str(tile) in known] or tiles
        return min(tiles, key=lambda tile: predicted_us(problem, tile, self._multiprocessors))


def choose(problem: GemmProblem, capability: tuple[int, int], multiprocessors: int) -> Launch:
    """The launch that is predicted to be fastest, or of kernels without a model was measured to be.

    Raises DeviceError where no tile fits the device.
    """
    return Chooser(problem, capability, multiprocessors)(problem)
