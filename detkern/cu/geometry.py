"""The launch of a tile on a problem: load paths, grid, cluster, tensor maps. None of it can change a bit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from ..errors import DeviceError
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from .gemm_tile import SHARED_A, SHARED_B, Load, Tile, build_for, scratch_bytes
from .loader import KernelBuild
from .tensor_map import BOX_WIDTH, SIZE_LIMIT, MapShape, available, map_shapes, out_quads, output_map_shape

__all__ = [
    "GRID_LIMIT", "Fitted", "Launch", "Maps", "along_k", "launch_for", "load_paths", "operand_map", "oriented", "takes",
    "tile_count", "writes",
]  # fmt: skip

# Of B, that a CTA asks the L2 cache for ahead: a multiple of so many bytes. And the columns a multiprocessor below
# which a chain takes longer than memory.
_PREFETCH_UNIT = 32 * 1024
_COLUMNS_OF_A_CHAIN = 12
GRID_LIMIT = 2**31 - 1  # blocks along x
_STEP = 16  # k of a product of the tensor cores


@dataclass(slots=True)
class Maps:
    """What TMA is told of the operands, and of the output where it writes that too."""

    a: MapShape
    b: MapShape
    out: MapShape | None
    rest: MapShape | None = None  # of b, whose columns behind its last whole box a wider tile takes by narrower ones

    @property
    def whole_boxes(self) -> int:
        """GemmParams::whole_boxes: bit 0 for a, bit 1 for b."""
        return int(self.a.boxes is not None) | int(self.b.boxes is not None) << 1


@dataclass(slots=True)
class Launch:
    """A kernel and how it is launched: `grid` CTAs in a row, of `threads` threads, in clusters of `cluster`. maps:
    where the kernel takes them. prefetch_bytes: of B, that each CTA asks the L2 cache for while the grid before still
    ends."""

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
    """The problem as the tile's kernel has it: a swapped tile's is the transpose, but for the bias, which goes by rows
    then."""
    return _transposed(problem) if tile.swapped else problem


def _along(size: int, unit: int, pairs: bool) -> int:
    """Tiles of `unit` along a size. pairs: they are in clusters of two, the second of which may be outside."""
    return -(-size // (2 * unit)) * 2 if pairs else -(-size // unit)


def tile_count(problem: GemmProblem, tile: Tile) -> int:
    """The CTAs that the tiles would occupy, those of a cluster's tiles that are outside the output too. problem:
    oriented."""
    count = _along(problem.m, tile["TILE_M"], tile.shares == SHARED_B)
    return count * _along(problem.n, tile["TILE_N"], tile.shares == SHARED_A) * math.prod(problem.batch)


def _has_rows_to_share(problem: GemmProblem, tile: Tile) -> bool:
    """Whether there is a whole tile of rows, where the CTAs of a cluster copy parts of tiles for one another: boxes of
    A have no more rows than there are, and parts of such boxes are none that the kernel knows."""
    return not tile.shares or problem.m >= tile["TILE_M"]


def launch_for(
    problem: GemmProblem, tile: Tile, multiprocessors: int, loads: tuple[Load, Load] | None = None
) -> Launch:
    """The launch of a given tile. loads: slower paths than the operands allow, for tests."""
    return Fitted(problem, tile, multiprocessors, loads or load_paths(problem)).launch(problem)


class Fitted:
    """A tile for the products of one layout: what does not depend on m is worked out once, so that an m that was never
    seen costs little."""

    __slots__ = (
        "_alone_to", "_build", "_least", "_loads", "_maps", "_most", "_others", "_prefetch", "_read", "_scratch",
        "_threads", "_tile",
        "_unit",
    )  # fmt: skip

    def __init__(self, problem: GemmProblem, tile: Tile, multiprocessors: int, loads: tuple[Load, Load]) -> None:
        self._tile, self._loads = tile, loads
        self._build = build_for(problem.contract, problem.a.dtype, tile, *loads)
        self._maps = _FittedMaps(problem, tile, *loads) if tile.by_tma else None
        self._threads = tile.threads
        self._scratch = scratch_bytes(tile, problem.k, 1)
        # Of the tile along the caller's m, and tiles along all else.
        rows, columns = (tile["TILE_M"], tile.shares == SHARED_B), (tile["TILE_N"], tile.shares == SHARED_A)
        self._unit, across = (columns, rows) if tile.swapped else (rows, columns)
        self._others = _along(problem.n, *across) * math.prod(problem.batch)
        # Where scratch is a slot a CTA, or the loads of the next tile begin before the last one is written, no more
        # CTAs than run at once, each of which walks over several tiles.
        walks = tile.by_tma or self._scratch > 0
        self._most = multiprocessors * tile["CTAS_PER_SM"] if walks else GRID_LIMIT
        self._least, self._alone_to = self._rows(problem.n, tile)
        self._prefetch, self._read = _prefetch_bytes(problem, tile, multiprocessors)

    @staticmethod
    def _rows(n: int, tile: Tile) -> tuple[float, float]:
        """The least m that the tile takes, and the largest for which its CTAs are in no clusters of two. Two run on a
        pair of multiprocessors; of tiles below one another, which are launched one behind the other, what they read of
        B comes faster there, whether the kernel knows of it or not."""
        least = tile["TILE_M"] if tile.shares else 0
        alone = -1 if tile.shares else tile["TILE_M"] if tile.kernel.pairs_ctas else math.inf
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
    """Launch.prefetch_bytes at least, and what a CTA reads of B for each of its tiles, where it asks for a quarter of
    that, up to 128 KiB (docs/hopper.md), or 0. 32 KiB where other CTAs ask for the same columns, as they do for more
    rows than a tile has, and where a chain takes longer than memory: its first operands come behind the rest."""
    if not tile.kernel.prefetches or problem.batch:
        return 0, 0
    if tile.swapped or tile.shares or problem.n < _COLUMNS_OF_A_CHAIN * multiprocessors:
        return _PREFETCH_UNIT, 0
    return _PREFETCH_UNIT, 2 * problem.k * tile["TILE_N"]


def takes(problem: GemmProblem, tile: Tile, loads: tuple[Load, Load]) -> bool:
    """Whether a tile's kernel can compute the problem on these load paths."""
    if loads not in tile.loads:
        return False
    if tile.kernel.modelled and not writes(tile, out_quads(problem), output_map_shape(problem) is not None):
        return False
    if tile.by_tma and not (available() and map_shapes(problem, along_k(loads)) is not None):
        return False
    problem = oriented(problem, tile)
    # Boxes of a swapped tile's tokens are whole.
    if not _has_rows_to_share(problem, tile) or (tile.swapped and problem.n < tile["TILE_N"]):
        return False
    return not tile.by_tma or tile_count(problem, tile) <= GRID_LIMIT


def writes(tile: Tile, quads: bool, mapped: bool) -> bool:
    """Whether a tile of mma_wgmma.json writes outputs that are rows of binary32 by 16 bytes, that have a tensor map,
    or neither."""
    return quads if tile.f32_out else not quads and bool(tile["STRIDED_OUT"] or mapped)


def along_k(loads: tuple[Load, Load]) -> tuple[bool, bool]:
    return loads[0] == Load.K_MAJOR, loads[1] == Load.K_MAJOR


class _FittedMaps:
    """The maps of a tile for the products of one layout. Where the lines of a run along k, and so m of them lie below
    one another as in the output, only their number changes with m. b's map is one for all, and keeps what the driver
    made of it."""

    __slots__ = ("_a", "_b", "_by_lines", "_few", "_loads", "_out", "_rest", "_tile")

    def __init__(self, problem: GemmProblem, tile: Tile, load_a: Load, load_b: Load) -> None:
        self._tile, self._loads = tile, (load_a, load_b)
        made = _maps(problem, tile, load_a, load_b)
        self._a, self._b = (made.b, made.a) if tile.swapped else (made.a, made.b)
        self._out, self._rest, self._few = made.out, made.rest, 0
        self._by_lines = load_a == Load.K_MAJOR and problem.m > 1
        if self._by_lines and not tile.swapped:
            self._a = _operand_map(tile, self._a, tile["TILE_M"], load_a, halves=tile.shares == SHARED_A)
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
        return Maps(self._b, a, out) if self._tile.swapped else Maps(a, self._b, out, self._rest)


def _maps(problem: GemmProblem, tile: Tile, load_a: Load, load_b: Load) -> Maps:
    """The tensor maps with the tile's boxes, of the operands as the kernel has them."""
    shapes = map_shapes(problem, along_k((load_a, load_b)))
    if shapes is None:
        raise DeviceError(f"TMA cannot describe the operands of {problem}")
    out = output_map_shape(problem) if tile.kernel.output_map else None
    if tile.swapped:
        shapes, load_a, load_b = shapes[::-1], load_b, load_a
    present = None if tile.fills and shapes[0].whole else oriented(problem, tile).m
    map_b = _operand_map(tile, shapes[1], tile["TILE_N"], load_b, halves=tile.shares == SHARED_B)
    rest = tile.get("REST_N", 0)
    return Maps(
        a=_operand_map(tile, shapes[0], tile["TILE_M"], load_a, present, tile.shares == SHARED_A),
        b=map_b,
        out=None if out is None else replace(out, rows=tile["TILE_N"] if tile.swapped else 16),
        rest=replace(map_b, width=rest) if rest and tile["TILE_N"] > BOX_WIDTH else None,
    )


def _operand_map(
    tile: Tile, shape: MapShape, tile_mn: int, load: Load, present: int | None = None, halves: bool = False
) -> MapShape:
    """The map with a tile's boxes."""
    narrows = tile.kernel.narrows and not tile.shares
    return operand_map(shape, tile["TILE_K"], tile_mn, load, present, halves, narrows)


def operand_map(
    shape: MapShape, tile_k: int, tile_mn: int, load: Load, present: int | None, halves: bool, narrows: bool
) -> MapShape:
    """The map with the boxes of tiles of tile_mn rows or columns, tile_k deep.

    present: rows that there are, where copying those outside would take time.
    halves:  each CTA of a cluster copies half of the boxes, or of a single box half of the rows.
    narrows: boxes are no wider than the matrix.
    """
    k_major = load == Load.K_MAJOR
    along, rows = (tile_k, tile_mn) if k_major else (tile_mn, tile_k)
    # Tiles that are not of whole boxes start anywhere between them.
    boxes: int | None = along // BOX_WIDTH if shape.whole and along % BOX_WIDTH == 0 else None
    width = BOX_WIDTH
    if narrows:
        # MatrixSource of producer.cuh counts the same bytes.
        line, across = shape.sizes[:2]
        if line < BOX_WIDTH:
            width = -(-line // (_STEP if k_major else 8)) * (_STEP if k_major else 8)
        if not k_major:
            width = min(width, along)
            if across < BOX_WIDTH:
                rows, boxes = -(-across // _STEP) * _STEP, None
    if k_major and present is not None and present < rows:
        return replace(shape, rows=present, width=width)
    if halves:
        count = along // BOX_WIDTH
        rows, boxes = (rows, boxes and boxes // 2) if count > 1 else (rows // 2, boxes)
    return replace(shape, rows=rows, boxes=boxes, width=width)
