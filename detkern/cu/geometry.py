"""Which tile computes a problem, and the launch that follows from it. None of it can change a bit.

The tables are tiles/<kernel>.json, one object a tile: its macros; `loads`, the load paths of A and B that it is built for
("any", "vector": without gathering, or a list such as "KM": K_MAJOR and MN_MAJOR); `wave_us`, the time of 4096 k when every
multiprocessor holds CTAS_PER_SM CTAs, and `alone_us`, when it holds one, on an H200 (`python -m benchmarks.cuda_gemm
--tiles`; of mma_wgmma.json at 1.9 GHz by what docs/hopper.md says limits a step: the chain, the products or what enters a
multiprocessor; of fma_narrow.json by docs/hopper.md); `time`, by class of products the numbers of time_model.py, which go before these where a tile has them; and the
operand types it is for, where not for all. Each kernel file says in its head what its macros mean and
how much shared memory and scratch they need; those formulas are repeated here. What was measured on whole shapes goes
before what these numbers predict (tuned.py).
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from ..contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from ..dtypes import DType, by_name
from ..errors import DeviceError
from ..problem import GemmProblem, Matrix
from .loader import KernelBuild
from .tensor_map import BOX_WIDTH, MapShape, available, map_shapes, out_pairs, output_map_shape
from .time_model import Coefficients, Work, coefficients_of, time_us
from .tuned import labels

__all__ = [
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
    "oriented",
    "portable_sources",
    "predicted_us",
    "shared_limit",
    "source_of",
    "takes",
    "tiles_for",
    "time_class",
    "work",
]

_TABLES = Path(__file__).parent / "tiles"
_TABLE_OF = {FMA: "fma", MMA16: "mma", MMA8: "mma", TREE: "tree", TREE_MMA16: "tree_mma"}
# Kernels that a contract has besides, on every device or on one generation of them, by its compute capability.
_TABLES_BESIDES = {FMA: ("fma_narrow",), MMA16: ("mma_wgmma",), TREE_MMA16: ("tree_wgmma",)}
_CAPABILITY_OF = {"mma_wgmma": (9, 0), "tree_wgmma": (9, 0)}
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
# What a tile takes longer where lines are not of whole 128 bytes: each row of a box lies in two of the L2's lines. CTAs that
# share an operand read fewer.
_BROKEN_LINES, _BROKEN_LINES_SHARED = 1.6, 1.2

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
    wave_us, alone_us: of 4096 k with a multiprocessor full of CTAs, and with one on it.
    fills:   whole boxes of A are copied where there are fewer rows, too: one copy a stage, which brings zeros as well.
    times:   what time_model.py predicts by, a class each; without those of a class, wave_us and alone_us decide.
    """

    table: str
    macros: tuple[tuple[str, int], ...]
    operands: tuple[DType, ...]
    loads: frozenset[tuple[Load, Load]]
    wave_us: float
    alone_us: float
    fills: bool = False
    times: tuple[tuple[str, Coefficients], ...] = ()

    @functools.cached_property
    def coefficients(self) -> dict[str, Coefficients]:
        """`times` by class."""
        return dict(self.times)

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
        words += ["in turn"] if self.get("IN_TURN", 0) else []
        words += ["filled"] if self.fills else []
        words += [f"{self['CTAS_PER_SM']} an SM"] if self["CTAS_PER_SM"] > 1 else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Maps:
    """What TMA is told of the operands, and of the output where it writes that too."""

    a: MapShape
    b: MapShape
    out: MapShape | None

    @property
    def whole_boxes(self) -> int:
        """GemmParams::whole_boxes: bit 0 for a, bit 1 for b."""
        return int(self.a.boxes is not None) | int(self.b.boxes is not None) << 1


@dataclass(frozen=True, slots=True)
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
        loads, wave = _loads(row.pop("loads")), row.pop("wave_us")
        alone, fills, times = row.pop("alone_us", wave), row.pop("fills", False), coefficients_of(row.pop("time", {}))
        result.append(Tile(name, tuple(row.items()), operands, loads, wave, alone, fills, times))
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
    if tile.swapped:
        load_a, load_b = load_b, load_a
    macros = [("OPERAND", operand.code), ("LOAD_A", int(load_a)), ("LOAD_B", int(load_b)), *tile.macros]
    if contract in (MMA16, MMA8):
        macros.append(("MMA_K", 16 if contract == MMA16 else 8))
    if tile.table in ("fma", "fma_narrow", "tree"):
        macros.append(("THREADS", tile.threads))
    macros.append(("SMEM_BYTES", shared))
    return KernelBuild(f"{tile.table}.cu", tuple(macros), shared)


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


def _tile_count(problem: GemmProblem, tile: Tile) -> int:
    """The CTAs that the tiles would occupy, those of a cluster's tiles that are outside the output too. problem: oriented."""
    rows, columns = tile["TILE_M"], tile["TILE_N"]
    count = -(-problem.m // (2 * rows)) * 2 if tile.shares == SHARED_B else -(-problem.m // rows)
    count *= -(-problem.n // (2 * columns)) * 2 if tile.shares == SHARED_A else -(-problem.n // columns)
    for size in problem.batch:
        count *= size
    return count


def _cluster(problem: GemmProblem, tile: Tile) -> int:
    """The CTAs of a cluster. Two run on a pair of multiprocessors; of tiles below one another, which are launched one behind
    the other, what they read of B comes faster there, whether the kernel knows of it or not."""
    pairs = tile.table == "mma_wgmma" and problem.m > tile["TILE_M"]
    return 2 if tile.shares or pairs else 1


def _has_rows_to_share(problem: GemmProblem, tile: Tile) -> bool:
    """Whether there is a whole tile of rows, where the CTAs of a cluster copy parts of tiles for one another: boxes of A
    have no more rows than there are, and parts of such boxes are none that the kernel knows."""
    return not tile.shares or problem.m >= tile["TILE_M"]


def launch_for(
    problem: GemmProblem, tile: Tile, multiprocessors: int, loads: tuple[Load, Load] | None = None
) -> Launch:
    """The launch of a given tile. loads: slower paths than the operands allow, for tests."""
    load_a, load_b = loads or load_paths(problem)
    maps = _maps(problem, tile, load_a, load_b) if tile.by_tma else None
    problem = oriented(problem, tile)
    if not _has_rows_to_share(problem, tile):
        raise DeviceError(f"tile {tile} copies parts of whole tiles of rows, and {problem} has fewer")
    cluster = _cluster(problem, tile)
    # Where scratch is a slot a CTA, or the loads of the next tile begin before the last one is written, no more CTAs than
    # run at once, each of which walks over several tiles.
    walks = tile.by_tma or _scratch_bytes(tile, problem.k, 1) > 0
    most = multiprocessors * tile["CTAS_PER_SM"] if walks else _GRID_LIMIT
    grid = cluster * max(1, min(-(-_tile_count(problem, tile) // cluster), most // cluster))
    return Launch(
        tile=tile,
        build=build_for(problem.contract, problem.a.dtype, tile, load_a, load_b),
        load_a=load_a,
        load_b=load_b,
        grid=grid,
        threads=tile.threads,
        scratch_bytes=_scratch_bytes(tile, problem.k, grid),
        cluster=cluster,
        maps=maps,
        prefetch_bytes=_prefetch_bytes(problem, tile, grid, multiprocessors),
    )


def _prefetch_bytes(problem: GemmProblem, tile: Tile, grid: int, multiprocessors: int) -> int:
    """Launch.prefetch_bytes: a quarter of what the CTA reads of B in all, from 32 to 128 KiB (docs/hopper.md). 32 where
    other CTAs ask for the same columns, and where a chain takes longer than memory: its first operands come behind the rest.
    """
    if tile.table != "mma_wgmma" or problem.batch:
        return 0
    if tile.swapped or tile.shares or problem.m > tile["TILE_M"] or problem.n < _COLUMNS_OF_A_CHAIN * multiprocessors:
        return _PREFETCH_UNIT
    read = 2 * problem.k * tile["TILE_N"] * -(-_tile_count(problem, tile) // grid)
    return _PREFETCH_UNIT * min(4, -(-read // (4 * _PREFETCH_UNIT)))


def takes(problem: GemmProblem, tile: Tile, loads: tuple[Load, Load]) -> bool:
    """Whether a tile's kernel can compute the problem on these load paths."""
    if loads not in tile.loads:
        return False
    if (
        not tile.get("STRIDED_OUT", 1)
        and output_map_shape(problem) is None
        and (tile.swapped or not out_pairs(problem))
    ):
        return False
    if tile.by_tma and not (available() and map_shapes(problem, _along_k(loads)) is not None):
        return False
    problem = oriented(problem, tile)
    # Boxes of a swapped tile's tokens are whole.
    if not _has_rows_to_share(problem, tile) or (tile.swapped and problem.n < tile["TILE_N"]):
        return False
    return not tile.by_tma or _tile_count(problem, tile) <= _GRID_LIMIT


def _along_k(loads: tuple[Load, Load]) -> tuple[bool, bool]:
    return loads[0] == Load.K_MAJOR, loads[1] == Load.K_MAJOR


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


@functools.lru_cache(maxsize=8)
def _whole_lines(problem: GemmProblem) -> bool:
    """Whether the lines of both operands start at multiples of 128 bytes from one another."""
    between = ((max(abs(one.row_stride), abs(one.col_stride)), one.dtype.itemsize) for one in (problem.a, problem.b))
    return not any(stride > 1 and stride * itemsize % 128 for stride, itemsize in between)  # 1: there is one line


# Of the problem in hand: the choice of a tile asks for every tile of the tables.
@functools.lru_cache(maxsize=8)
def time_class(problem: GemmProblem) -> str:
    """The class of time_model.py that a problem is of; it is one of that module's only where no operand is gathered."""
    return "".join(load.name[0] for load in load_paths(problem)) + ("f" if problem.out.dtype.itemsize == 4 else "")


def work(problem: GemmProblem, tile: Tile, multiprocessors: int) -> Work:
    """What a tile has to do, as time_model.py counts it."""
    problem = oriented(problem, tile)
    cluster = _cluster(problem, tile)
    at_once = multiprocessors * tile["CTAS_PER_SM"] // cluster * cluster
    return Work(_tile_count(problem, tile), at_once, problem.k * _broken(problem, tile), _memory_us(problem))


@functools.lru_cache(maxsize=8)
def _memory_us(problem: GemmProblem) -> float:
    """Of both operands and the output, once each, from and to memory."""
    batch = math.prod(problem.batch)
    read = (problem.m + problem.n) * problem.k * problem.a.dtype.itemsize
    return batch * (read + problem.m * problem.n * problem.out.dtype.itemsize) / _BYTES_PER_US


def _broken(problem: GemmProblem, tile: Tile) -> float:
    """How many times as long a tile takes where lines are not of whole 128 bytes."""
    if not tile.by_tma or _whole_lines(problem):
        return 1.0
    return _BROKEN_LINES_SHARED if tile.shares else _BROKEN_LINES


def predicted_us(problem: GemmProblem, tile: Tile, multiprocessors: int) -> float:
    """A time to compare tiles by: by time_model.py where the table has the numbers for it, else full waves of CTAs and what is
    left on the multiprocessors; no less than the operands take from memory."""
    if tile.times and (coefficients := tile.coefficients.get(time_class(problem))) is not None:
        return time_us(coefficients, work(problem, tile, multiprocessors))
    at_once = tile["CTAS_PER_SM"]
    waves, left = divmod(_tile_count(oriented(problem, tile), tile), multiprocessors * at_once)
    time = waves * tile.wave_us
    if left:
        on_one = -(-left // multiprocessors)
        more = (tile.wave_us - tile.alone_us) * (on_one - 1) / (at_once - 1) if on_one > 1 else 0.0
        time += tile.alone_us + more
    time *= problem.k / 4096 * _broken(problem, tile)
    # Of tiles that all wait for memory, the one that leaves most room is taken.
    return max(time, _memory_us(problem)) + 0.05 * time


def candidates(problem: GemmProblem, capability: tuple[int, int], loads: tuple[Load, Load]) -> list[Tile]:
    """The tiles whose kernels can compute the problem on a device of that capability."""
    return [
        tile
        for tile in tiles_for(problem.contract, problem.a.dtype)
        if fits(tile, capability) and takes(problem, tile, loads)
    ]


def choose(problem: GemmProblem, capability: tuple[int, int], multiprocessors: int) -> Launch:
    """The launch that was measured to be fastest, or that the tables predict to be."""
    loads = load_paths(problem)
    tiles = candidates(problem, capability, loads)
    if not tiles:
        raise DeviceError(
            f"no tile of {problem.contract} fits the shared memory of compute capability {capability[0]}.{capability[1]}"
        )
    if not problem.batch:
        names = "".join(load.name[0] for load in loads)
        known = labels(problem.contract.name, names, problem.m, problem.n, problem.k, multiprocessors)
        tiles = [tile for tile in tiles if str(tile) in known] or tiles
    return launch_for(
        problem, min(tiles, key=lambda tile: predicted_us(problem, tile, multiprocessors)), multiprocessors
    )
