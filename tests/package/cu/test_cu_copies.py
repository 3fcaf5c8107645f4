"""What the Hopper kernels copy into a stage, modelled after pipeline.cuh and operand_tile.cuh, against the maps and the
launch that geometry.py gives: every element of every stage is the operand's, or zero outside it, and a barrier counts
every byte."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from detkern.cu.gemm_tile import Load, Tile, tiles_for
from detkern.cu.geometry import SHARED_A, SHARED_B, Launch, launch_for, load_paths, oriented, takes
from detkern.cu.tensor_map import MapShape, folded
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.operations.matrix import Matrix
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import MMA16, TREE_MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

ATOM = 64  # elements of a row of a box
UNTOUCHED, CLEARED, ZERO = -7, -5, -1  # instead of the address of an element
Copy = tuple[int, tuple[int, int, int, int]]  # where in the tile, in bytes; coordinates of the box


@dataclass(frozen=True)
class TmaTile:
    """operand_tile.cuh's: `rows` of m or n by `extent_k`, in boxes of 64 beside one another."""

    mn_rows: bool
    rows: int
    extent_k: int

    @property
    def boxes(self) -> int:
        return (self.rows if self.mn_rows else self.extent_k) // ATOM

    @property
    def rest(self) -> int:
        """Lines behind the boxes."""
        return self.rows % ATOM if self.mn_rows else 0

    @property
    def box_rows(self) -> int:
        return self.extent_k if self.mn_rows else self.rows

    @property
    def elements(self) -> int:
        """Of its memory."""
        return self.box_rows * ATOM * (self.boxes + (self.rest > 0))

    def copies(self, row: int, k: int, batch: tuple[int, int], whole: bool, rank: int | None) -> list[Copy]:
        """rank: of the CTA that copies half of it for both."""
        first, count, first_row = 0, self.boxes, 0
        if rank is not None and self.boxes > 1:
            assert self.boxes % 2 == 0
            first, count = rank * self.boxes // 2, self.boxes // 2
        elif rank is not None:
            first_row = rank * self.box_rows // 2
        x, y = (row, k) if self.mn_rows else (k, row)
        x, y = x + first * ATOM, y + first_row
        target = 128 * (first * self.box_rows + first_row)
        assert target % 1024 == 0, "the swizzle follows the address"
        outer, inner = batch
        if whole:
            assert not inner
            return [(target, (0, y, x // ATOM, outer))]
        return [(target + 128 * box * self.box_rows, (x + box * ATOM, y, inner, outer)) for box in range(count)]


def _copied(stage: np.ndarray, shape: MapShape, copies: list[Copy]) -> int:
    """Put the addresses of what the copies bring where they bring it; returns their bytes."""
    sizes, strides, box = shape.dimensions()
    for target, (x, y, z, w) in copies:
        across, rows, boxes = (
            np.arange(box[0]) + x,
            np.arange(box[1])[:, None] + y,
            np.arange(box[2])[:, None, None] + z,
        )
        there = (across < sizes[0]) & (rows < sizes[1]) & (boxes < sizes[2]) & (w < sizes[3])
        addresses = np.where(there, 2 * across + strides[0] * rows + strides[1] * boxes + strides[2] * w, ZERO).ravel()
        # Lines of a box lie 128 bytes apart, however wide it is.
        lines = stage[target // 2 : target // 2 + ATOM * box[1] * box[2]].reshape(-1, ATOM)[:, : box[0]]
        assert np.isin(lines, (UNTOUCHED, CLEARED)).all(), "two copies to one place"
        lines[:] = addresses.reshape(lines.shape)
    return 2 * len(copies) * int(np.prod(box))


def _wanted(
    tile: TmaTile,
    matrix: Matrix,
    mn: int,
    k_size: int,
    row: int,
    k: int,
    batch: tuple[int, ...],
    present: int,
    narrows: bool,
) -> np.ndarray:
    """The address of each element of a stage by the operand's strides. narrows: boxes have no more than there is."""
    boxes = np.arange(tile.boxes + (tile.rest > 0))[:, None, None]
    lines, elements = np.arange(tile.box_rows)[:, None], np.arange(ATOM)
    along = boxes * ATOM + elements
    at_mn, at_k = (
        (row + along + 0 * lines, k + lines + 0 * along)
        if tile.mn_rows
        else (row + lines + 0 * along, k + along + 0 * lines)
    )
    batch_offset = sum(index * stride for index, stride in zip(batch, matrix.batch_strides, strict=True))
    mn_stride, k_stride = matrix.row_stride, matrix.col_stride
    addresses = 2 * (at_mn * mn_stride + at_k * k_stride + batch_offset)
    addresses = np.where((at_mn < mn) & (at_k < k_size), addresses, ZERO)
    if not tile.mn_rows:
        addresses = np.where(lines < present, addresses, ZERO if narrows and k_size < ATOM else UNTOUCHED)
    if narrows and k_size < ATOM:
        copied = (lines if tile.mn_rows else along) < _up(k_size, 16)
        addresses = np.where(copied, addresses, ZERO)
    if narrows and tile.mn_rows and mn < ATOM:
        addresses = np.where(along < _up(mn, 8), addresses, ZERO if k_size < ATOM else UNTOUCHED)
    if tile.mn_rows:
        addresses = np.where(along < tile.rows, addresses, ZERO if narrows and k_size < ATOM else UNTOUCHED)
    return addresses.ravel()


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _bytes(tile: TmaTile, mn: int, k: int, present: int, narrows: bool) -> int:
    """That MatrixSource expects in a stage: from the sizes alone."""
    few_k = narrows and k < ATOM
    if not tile.mn_rows:
        return 2 * (present * _up(k, 16) if few_k else tile.elements // tile.box_rows * present)
    line = min(_up(mn, 8), tile.rows) if narrows and mn < ATOM else tile.rows
    return 2 * line * (_up(k, 16) if few_k else tile.box_rows)


def _turned(matrix: Matrix) -> Matrix:
    """b with n first, as _wanted takes it."""
    return replace(matrix, row_stride=matrix.col_stride, col_stride=matrix.row_stride)


def _inside(start: int, extent: int, size: int, unit: int) -> int:
    return min(start, max(size - extent + unit - 1, 0) // unit * unit)


def _pairs(problem: GemmProblem, tile: Tile, rng: random.Random) -> Iterator[list[tuple[int, int, int]]]:
    """(index of the batch, row, column) of the tiles that the CTAs of a cluster (or one alone) compute together, moved
    back inside of the output as TileWalk::output() does. problem: oriented."""
    shares = tile.shares
    rows, columns = tile["TILE_M"], tile["TILE_N"]
    row_unit = 8 if load_paths(problem)[0] == Load.MN_MAJOR else 1
    column_unit = 1 if tile.swapped and load_paths(problem)[1] == Load.K_MAJOR else 8
    step_m, step_n = rows * (1 + (shares == SHARED_B)), columns * (1 + (shares == SHARED_A))
    for _ in range(3):
        row, column = rng.randrange(-(-problem.m // step_m)) * step_m, rng.randrange(-(-problem.n // step_n)) * step_n
        batch = rng.randrange(math.prod(problem.batch))
        yield [
            (
                batch,
                _inside(row + rank * rows * (shares == SHARED_B), rows, problem.m, row_unit),
                _inside(column + rank * columns * (shares == SHARED_A), columns, problem.n, column_unit),
            )
            for rank in range(2 if shares else 1)
        ]


def _check(problem: GemmProblem, tile: Tile, loads: tuple[Load, Load], launch: Launch, rng: random.Random) -> None:
    assert launch.maps is not None
    if tile.swapped:
        problem, loads = oriented(problem, tile), loads[::-1]
    mapped = folded(problem)
    assert mapped is not None
    shares = tile.shares
    a = TmaTile(loads[0] == Load.MN_MAJOR, tile["TILE_M"], tile["TILE_K"])
    b = TmaTile(loads[1] == Load.MN_MAJOR, tile["TILE_N"], tile["TILE_K"])
    whole_a, whole_b = bool(launch.maps.whole_boxes & 1), bool(launch.maps.whole_boxes & 2)
    present = a.box_rows if a.mn_rows or whole_a else min(problem.m, a.box_rows)
    narrows = tile.table == "mma_wgmma" and not shares
    expected = _bytes(a, problem.m, problem.k, present, narrows) + _bytes(b, problem.n, problem.k, b.box_rows, narrows)
    few_a = narrows and (problem.m if a.mn_rows else problem.k) < ATOM
    few_b = narrows and (problem.n if b.mn_rows else problem.k) < ATOM
    before = CLEARED if narrows and problem.k < ATOM else UNTOUCHED

    def index_of(matrix: Matrix, batch: int, shared: int) -> tuple[int, int]:
        """BatchIndex::of: of a dimension along which the operand is broadcast, 0."""
        _, size = (*mapped.problem.batch, 1, 1)[:2]
        outer, inner = (
            index * bool(stride)
            for index, stride in zip(divmod(batch, size), (*matrix.batch_strides, 0, 0), strict=False)
        )
        return outer, inner // shared

    for ctas in _pairs(problem, tile, rng):
        k = rng.randrange(-(-problem.k // tile["TILE_K"])) * tile["TILE_K"]
        stages = [(np.full(a.elements, before), np.full(b.elements, before)) for _ in ctas]
        counted = [0 for _ in ctas]
        for rank, (batch, row, column) in enumerate(ctas):
            copies = (
                a.copies(
                    row, k, index_of(mapped.problem.a, batch, mapped.shared[0]), whole_a,
                    rank if shares == SHARED_A else None,
                )[: 1 if few_a else None],
                b.copies(
                    column, k, index_of(mapped.problem.b, batch, mapped.shared[1]), whole_b,
                    rank if shares == SHARED_B else None,
                )[: 1 if few_b else None],
            )  # fmt: skip
            assert (launch.maps.rest is None) == (b.rest == 0 or b.boxes == 0)
            if b.rest and not (few_b and b.boxes):
                outer, inner = index_of(mapped.problem.b, batch, mapped.shared[1])
                at = (column + b.boxes * ATOM, k, inner, outer)
                rest = launch.maps.rest or launch.maps.b
                counted[rank] += _copied(stages[rank][1], rest, [(128 * b.boxes * b.box_rows, at)])
            for side, (shape, shared) in enumerate(((launch.maps.a, SHARED_A), (launch.maps.b, SHARED_B))):
                for target in range(len(ctas)) if shares == shared else (rank,):
                    counted[target] += _copied(stages[target][side], shape, copies[side])
        assert counted == [expected] * len(ctas), f"{tile} {problem}"
        for (batch, row, column), (in_a, in_b) in zip(ctas, stages, strict=True):
            index = tuple(map(int, np.unravel_index(batch, problem.batch)))
            in_a, in_b = (np.where(one == CLEARED, ZERO, one) for one in (in_a, in_b))
            wanted = _wanted(a, problem.a, problem.m, problem.k, row, k, index, present, narrows)
            assert (in_a == wanted).all(), f"a of {tile} {loads} {problem}"
            wanted = _wanted(b, _turned(problem.b), problem.n, problem.k, column, k, index, b.box_rows, narrows)
            assert (in_b == wanted).all(), f"b of {tile} {loads} {problem}"


SIZES = [
    1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 72,
    96, 100, 128, 129, 192, 255, 256, 300, 320, 512, 1000,
]  # fmt: skip
LARGE = (2**31 - 1, 2**31 - 64, 2**24 + 8)


def _operand(
    mn: int, k: int, load: Load, batch: tuple[int, ...], rng: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) with m or n first."""
    slack = rng.choice((0, 0, 8, 56, 256))
    along, across = (k, mn) if load == Load.K_MAJOR else (mn, k)
    line = -(-along // 8) * 8 + slack
    strides = (line, 1) if load == Load.K_MAJOR else (1, line)
    size = across * line
    steps: tuple[int, ...] = rng.choice((0, size)), rng.choice((0, 7 * size + 64)), rng.choice((0, size))
    if len(batch) == 1:
        steps = steps[:1]
    elif len(batch) == 3:  # heads, or one matrix for all heads of a group
        steps = steps[1], *rng.choice(((batch[2] * size, size), (size, 0), (0, 0)))
    else:
        steps = steps[3 - len(batch) :]
    return (*batch, mn, k), (*steps, *strides)


def _problem(tile: Tile, loads: tuple[Load, Load], out: DType, rng: random.Random) -> GemmProblem:
    m, n, k = (rng.choice(SIZES) for _ in range(3))
    if tile.swapped:
        m = rng.choice([size for size in SIZES if size >= tile["TILE_N"]])
    if rng.random() < 0.1:
        m, n, k = rng.choice(((rng.choice(LARGE), n, k), (m, rng.choice(LARGE), k), (m, n, rng.choice(LARGE))))
    batch = rng.choice(((), (), (2,), (7,), (3, 5), (2, 3, 4)))
    (a_shape, a_strides), (b_shape, b_strides) = (
        _operand(m, k, loads[0], batch, rng),
        _operand(n, k, loads[1], batch, rng),
    )
    line = -(-n // 8) * 8
    out_strides = (20 * m * line + 64, math.prod(batch[2:]) * m * line, m * line)
    out_strides = {0: (), 1: out_strides[2:], 2: (out_strides[0], m * line)}.get(len(batch), out_strides)
    device = Device("cuda", 0)
    return gemm_problem(
        MMA16 if tile.table == "mma_wgmma" else TREE_MMA16,
        TensorView(4096, a_shape, a_strides, BF16, device),
        TensorView(4096, (*b_shape[:-2], k, n), (*b_strides[:-2], b_strides[-1], b_strides[-2]), BF16, device),
        TensorView(4096, (*batch, m, n), (*out_strides, line, 1), out, device),
        None,
        False,
    )  # fmt: skip


TILES = [tile for contract in (MMA16, TREE_MMA16) for tile in tiles_for(contract, BF16) if tile.by_tma]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_stage_holds_the_operands_and_its_barrier_counts_them(tile: Tile) -> None:
    rng = random.Random(str(tile))
    checked = 0
    for loads in sorted(tile.loads):
        for _ in range(40):
            problem = _problem(tile, loads, F32 if tile.f32_out else rng.choice((BF16, F16, F32)), rng)
            paths = load_paths(problem)  # of a single row, column or k another one may be the fastest
            if not takes(problem, tile, paths):
                continue
            _check(problem, tile, paths, launch_for(problem, tile, 132, paths), rng)
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_lie_inside_of_the_output_and_own_each_element_once(tile: Tile) -> None:
    """TileWalk's output() and own(): a tile has `extent` elements from its start,
    and owns those from its own place on."""
    for extent, unit in ((tile["TILE_M"], 1), (tile["TILE_M"], 8), (tile["TILE_N"], 1), (tile["TILE_N"], 8)):
        for size in (*SIZES, extent - 1, extent, extent + 1, 2 * extent - 1, 2 * extent + 7, 3 * extent):
            owned = np.zeros(size, int)
            for own in range(0, size + extent * (tile.shares > 0), extent):  # of a pair one may be outside
                start = _inside(own, extent, size, unit)
                assert start % unit == 0
                assert start <= own
                assert size < extent or start + extent < size + unit, "no more than a unit's rest is outside"
                owned[max(own, start) : start + extent] += 1
            assert (owned == 1).all()
