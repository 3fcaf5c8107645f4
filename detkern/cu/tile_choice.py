"""Which tile computes a problem. It can change a time, never a bit.

Tiles of mma_wgmma.cu are chosen by the model of time_model.py. Of the other kernels, what was measured on whole shapes
(tuned.py) goes before what `wave_us` of the tables predicts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import DeviceError
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from ..vocabulary.contracts import Contract
from ..vocabulary.dtypes import DType
from . import time_model
from .gemm_kernels import KERNELS
from .gemm_tile import Load, Tile, fits, table, tiles_for
from .geometry import GRID_LIMIT, Fitted, Launch, along_k, load_paths, takes, tile_count, writes
from .tensor_map import SIZE_LIMIT, available, map_shapes, out_quads, output_map_shape
from .tuned import labels

__all__ = ["Chooser", "candidates", "choose", "model_shapes", "predicted_us"]

_BYTES_PER_US = 4.3e6  # from an H200's memory
_SMALLEST_TILE = 16 * 8
_EACH_M = 64  # up to here a tile is chosen for every m
# What a tile takes longer where lines are not of whole 128 bytes: each row of a box lies in two of the L2's lines.
_BROKEN_LINES = 1.6


def _broken(matrix: Matrix) -> bool:
    """Whether the lines of an operand start at other distances than multiples of 128 bytes."""
    stride = max(abs(matrix.row_stride), abs(matrix.col_stride))
    return stride > 1 and stride * matrix.dtype.itemsize % 128 != 0  # 1: there is one line


class _Layout(NamedTuple):
    """What time_model.py and the load paths need of a problem besides m. by_tma: whether TMA can describe the operands.
    quads, mapped: of the output, as `geometry.writes` asks."""

    operand: DType
    n: int
    k: int
    batch: int
    loads: tuple[Load, Load]
    broken: tuple[bool, bool]
    by_tma: bool
    quads: bool
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
        available() and map_shapes(problem, along_k(loads)) is not None,
        out_quads(problem),
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
    for tile in _modelled_tiles() if layout.by_tma else ():
        rows = layout.n if tile.swapped else tile["TILE_M"]
        if (
            layout.loads in tile.loads
            and writes(tile, layout.quads, layout.mapped)
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
        layout.n, layout.k, along_k(layout.loads), layout.broken, layout.f32, layout.accumulate, layout.batch
    )
    numbers = time_model.numbers(tuple(map(str, tiles)))
    return time_model.prepare(model_shapes(tiles), numbers, product, multiprocessors)


def predicted_us(problem: GemmProblem, tile: Tile, multiprocessors: int) -> float:
    """A time to compare tiles of one table by: time_model.py's where that knows the kernel. Else by the table: full
    waves of CTAs, then what is left on the multiprocessors; no less than the operands take from memory."""
    if tile.kernel.modelled:
        layout = _layout(problem, load_paths(problem))
        return float(time_model.times_us(_prepared((tile,), layout, multiprocessors), problem.m)[0])
    at_once = tile["CTAS_PER_SM"]
    waves, left = divmod(tile_count(problem, tile), multiprocessors * at_once)
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
    """The tiles that time_model.py predicts to be fastest, of those that take the rows, for `_AT_ONCE` choices
    (`_choice`), which take four times as long as one. None where there are none."""
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


# Choices by the model are numbered: up to _EACH_M there is one for every m, from there on one for each multiple of 8
# and one for what is between two of them, since sides of tiles are multiples of 8.
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


def _has_model(contract: Contract, capability: tuple[int, int]) -> bool:
    return any(
        kernel.modelled and contract in kernel.contracts and kernel.capability in (None, capability)
        for kernel in KERNELS.values()
    )


def _modelled_tiles() -> list[Tile]:
    return [tile for kernel in KERNELS.values() if kernel.modelled for tile in table(kernel.name)]


class Chooser:
    """`choose` for the products of one layout, which differ in m alone: what else a choice needs is worked out once."""

    __slots__ = (
        "_by_lines", "_capability", "_fitted", "_loads", "_modelled", "_most", "_multiprocessors", "_of_model"
    )  # fmt: skip

    def __init__(self, problem: GemmProblem, capability: tuple[int, int], multiprocessors: int) -> None:
        self._capability, self._multiprocessors = capability, multiprocessors
        self._loads = load_paths(problem)
        self._fitted: dict[int, Fitted] = {}
        self._of_model = Load.STRIDED not in self._loads and _has_model(problem.contract, capability)
        # The most rows that tiles are chosen for by the model.
        self._most = _SMALLEST_TILE * GRID_LIMIT // max(math.prod(problem.batch) * problem.n, 1)
        # What the model asks of a layout depends on m where a's lines run along it, and where there is one of them.
        self._by_lines = self._loads[0] == Load.K_MAJOR and problem.m > 1
        self._modelled = self._model(problem) if self._of_model and self._by_lines else None

    def __call__(self, problem: GemmProblem) -> Launch:
        """As `choose`, of a problem of the layout."""
        tile = (self._fastest_modelled(problem) if self._of_model else None) or self._fastest_measured(problem)
        fitted = self._fitted.get(id(tile))
        if fitted is None:
            fitted = self._fitted[id(tile)] = Fitted(problem, tile, self._multiprocessors, self._loads)
        return fitted.launch(problem)

    def _model(self, problem: GemmProblem) -> _Modelled | None:
        return _modelled(_layout(problem, self._loads), self._capability, self._multiprocessors)

    def _fastest_modelled(self, problem: GemmProblem) -> Tile | None:
        """The tile of mma_wgmma.json that time_model.py predicts to be fastest; None where none can compute the
        problem."""
        m = problem.m
        if m > self._most:
            able = [tile for tile in candidates(problem, self._capability, self._loads) if tile.kernel.modelled]
            return min(able, key=lambda tile: predicted_us(problem, tile, self._multiprocessors), default=None)
        found = self._modelled if self._by_lines and 1 < m <= SIZE_LIMIT else self._model(problem)
        if found is None:
            return None
        group, place = divmod(_choice(m), _AT_ONCE)
        return _fastest(found, group)[place]

    def _fastest_measured(self, problem: GemmProblem) -> Tile:
        """Of the other kernels."""
        tiles = [tile for tile in candidates(problem, self._capability, self._loads) if not tile.kernel.modelled]
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
