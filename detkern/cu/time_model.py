"""How long a tile of mma_wgmma.cu takes for a product: what tiles are chosen by. It can change a time, never a bit.

A product is [m, k] @ [k, n]; a tile is BM x BN of what its kernel computes (of the transpose, where it is swapped). In
µs,

    time = shape * (FIXED + cut + (computing^4 + memory^4 + cache^4)^(1/4))

    computing = walks * (STEP * cycles * k / 16 / clock + TILE)
    cycles    = (tensor^4 + shared^4 + entering^4 + chain^4)^(1/4) of a step of 16 k
    memory    = MEMORY * (operands + output + what is read again) / bandwidth * (ceil(w) / w)^(1/2)
    cache     = what all CTAs read / bandwidth, less where those of a GPC read the same at one time

w is the tiles for each multiprocessor; walks is its whole part and, for what is left, ALONE to 1 the more CTAs still
run, most of it as soon as some of them share a pair of multiprocessors. tensor is BM/64 * BN/2 cycles; shared is what
wgmma reads and TMA writes at 128 bytes a cycle; entering are the rows and columns that come from the L2 cache, at 64
bytes a cycle, less what the CTA beside reads too; a chain's step takes 16.6 + BN/4 (docs/hopper.md). cut is for lines
that end inside of a box of 64 elements, which TMA fills slowly. FIXED, TILE, STEP, ALONE, MEMORY and the three slopes
of `shape` (in the logarithms of m, n and k) are a tile's own numbers and `Shared` is one set for all; `python -m
benchmarks.fit` fits them to products drawn at random and judges them on others.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "OWN",
    "SHARED",
    "Numbers",
    "Prepared",
    "Product",
    "TileShapes",
    "numbers",
    "prepare",
    "times_us",
    "times_us_of_each",
]

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
# One number for all, or one for each: the fit evaluates many products at once.
Value = Any

_FILE = Path(__file__).parent / "tiles" / "time_model.json"

# A tile's own numbers, and what they are where a tile has none. step, tile, fixed and memory: factors of what all tiles
# have.
# alone: added to the logit of Shared.alone. by_m, by_n, by_k: slopes of the logarithm of the time, by logarithms of the
# sizes.
OWN = {"step": 1.0, "tile": 1.0, "fixed": 1.0, "alone": 0.0, "memory": 1.0, "by_m": 0.0, "by_n": 0.0, "by_k": 0.0}

# The numbers of all tiles and where the fit begins. tensor, shared, entering, chain: factors of the cycles that the
# hardware's rates give. pair_a, pair_b: of what the CTAs of a pair of multiprocessors both read, the part that comes
# once. shared_a, shared_b: of an operand that a cluster shares, the part that each CTA waits for. gpc: the CTAs that
# what they all read comes once for. km, mm: factors of a step, by load paths. broken_a, broken_b: of a step, where
# lines are not of whole 128 bytes. padding: of the k that fill up the last stage. fixed_us and fixed_area_us (of 128
# x 128): of a grid. tile_us, out_us and area_us (of 128 x 128 outputs that there are, and of the tile's): of a tile;
# few_us: of a tile of more than 64 rows that has not all of them. f32, accumulate: factors of out_us, area_us and
# few_us. alone: of a walk, where few CTAs run. half, over: of the rest, the part that there is when half of the
# multiprocessors have a CTA, and when one more has. spread: of memory's time, so much where each has a pair to
# itself, and runs alone there. tb_s: of memory. segment: outputs of 128 columns count for so much more there, of
# fewer for more still. cache_tb_s: of L2. again: of what a wave has to read again; resident_mb: operands that L2
# keeps. cut_k_ns, cut_mn_ns: for each line of a tile that ends inside of a box, for K-major and for MN-major
# operands; cut_n_ns: for each k of a line that is not there.
SHARED = {
    "tensor": 1.15, "shared": 0.8, "entering": 0.8, "chain": 1.3, "pair_a": 0.6, "pair_b": 0.6, "shared_a": 0.5,
    "shared_b": 0.5, "gpc": 16.0, "km": 1.0, "mm": 1.0, "broken_a": 1.05, "broken_b": 1.05, "padding": 0.5,
    "fixed_us": 1.4, "fixed_area_us": 0.4, "tile_us": 0.1, "out_us": 0.8, "area_us": 0.05, "few_us": 0.3,
    "f32": 3.0, "accumulate": 2.0, "alone": 0.75, "half": 0.3, "spread": 0.45, "over": 0.85, "tb_s": 4.8,
    "segment": 0.1, "cache_tb_s": 9.0, "again": 1.2, "resident_mb": 30.0, "cut_k_ns": 0.007, "cut_mn_ns": 0.018,
    "cut_n_ns": 0.0002,
}  # fmt: skip

_CLOCK = 1700.0  # cycles a µs
_ENTERING = 64.0  # bytes a cycle
_BOX = 64
_MANY = 1e9  # rows: beyond any product
_FEW_COLUMNS = 8.0  # FEW_COLUMNS of pipeline.cuh's TileWalk, of swapped tiles


class TileShapes(NamedTuple):
    """The tiles, a value each: what the model knows of their kernels. rows, columns, stage_k: of a tile; share: 1 and 2
    where the CTAs of a cluster share A or B; band: rows of tiles that are walked over together; fills: whole boxes of A
    are copied where there are fewer rows."""

    rows: Array
    columns: Array
    stage_k: Array
    share: Array
    band: Array
    swapped: Flags
    fills: Flags


class Numbers(NamedTuple):
    """shared: by the names of SHARED. own: by those of OWN, a value for each tile."""

    shared: Mapping[str, float]
    own: Mapping[str, Array]


class Product(NamedTuple):
    """What the time depends on besides m. k_major: whether the lines of a and b run along k. broken: whether they are
    not at multiples of 128 bytes. out_bytes: of an output, read and written."""

    n: Value
    k: Value
    k_major: tuple[Value, Value]
    broken: tuple[Value, Value]
    f32: Value
    accumulate: Value
    batch: Value = 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """What does not depend on m, so that an m that was never seen costs little; a value a tile where it is not one for
    all."""

    unit: Array  # rows of m that a tile, or a pair of them, takes
    extent: Array  # of a tile along m
    each: Array  # for each of these units: tiles a multiprocessor
    down: tuple[Array, Array]  # rows of tiles that there are: so many, and so many for each unit
    across: tuple[Array, Array]  # columns of them
    band: Array
    few: Array  # columns of tiles up to which a band is one row of them
    at_once: Array  # tiles or pairs that run at one time
    rows: tuple[Array, Array]  # of A that a tile reads, at least and at most
    from_a: Array  # of what enters for each row
    from_b: Array  # what enters for B
    pairs_above: Array  # m above which CTAs are launched in pairs that copy nothing for one another
    paired: tuple[float, float]  # of A and of B, what a pair need not read twice
    gpc: float
    spread: float
    settled: float  # m above which what a tile reads depends on m no more
    entering: float
    limits: Array  # the other limits of a step, to the 4th power
    step_us: Array
    tile_us: Array
    out_us: Array
    few_us: Array
    unequal: Array  # 1 - alone
    idle: tuple[float, float, float]  # of that, by the part of the multiprocessors that are idle: _idle
    fixed_us: Array
    bytes_n: Value  # MB of operands and output, in all and for each row of m
    bytes_m: Value
    out_m: Value
    memory: Array
    cache: tuple[Array, Array]  # µs of what is read of A and B, for each tile a multiprocessor
    resident: Value  # MB of operands that L2 keeps, of each product of a batch
    again: float
    height: Array  # MB that a row and a column of tiles have
    width: Array
    cuts: bool  # whether there are any of these:
    cut: Array
    cut_rows: Array
    cut_few: Array
    cut_from: Array  # m
    shape: Array
    by_m: Array
    always: tuple[Array, Array, Array]  # _read above `settled`


def prepare(tiles: TileShapes, numbers: Numbers, product: Product, multiprocessors: int) -> Prepared:
    """All but m."""
    all_, own = numbers.shared, numbers.own
    rows, columns, swapped = tiles.rows, tiles.columns, tiles.swapped
    n, k = product.n, product.k
    a_along: Flags = (swapped & product.k_major[1]) | (~swapped & product.k_major[0])
    b_along: Flags = (swapped & product.k_major[0]) | (~swapped & product.k_major[1])
    broken_a = np.where(swapped, product.broken[1], product.broken[0])
    broken_b = np.where(swapped, product.broken[0], product.broken[1])
    pair_a, pair_b = np.where(tiles.share == 1, 2.0, 1.0), np.where(tiles.share == 2, 2.0, 1.0)
    extent = np.where(swapped, columns, rows)
    unit = np.where(swapped, columns * pair_a, rows * pair_b)
    along = np.ceil(n / np.where(swapped, rows * pair_b, columns * pair_a))
    # Of A a tile reads as many rows as there are, or whole boxes.
    whole = tiles.fills | ~a_along
    fixed_rows = np.where(whole, rows, np.minimum(rows, n))
    varies = ~swapped & ~whole
    alone_b = columns * np.where(tiles.share == 2, all_["shared_b"], 1.0)
    blocks = np.maximum(rows, 64.0) / 64
    limits = (
        (blocks * columns / 2 * all_["tensor"]) ** 4
        + ((blocks * (16 + columns / 4) + (rows + columns) / 4) * all_["shared"]) ** 4
        + ((16.6 + columns / 4) * all_["chain"]) ** 4
    )
    km = np.where(product.k_major[1], 1.0, np.where(product.k_major[0], all_["km"], all_["mm"]))
    broken = np.where(broken_a, all_["broken_a"], 1.0) * np.where(broken_b, all_["broken_b"], 1.0)
    stages = np.ceil(k / tiles.stage_k) * tiles.stage_k
    steps = (k + all_["padding"] * (stages - k)) / 16
    outputs = np.where(product.f32, all_["f32"], 1.0) * np.where(product.accumulate, all_["accumulate"], 1.0)
    area = rows * columns / 16384
    other = np.where(swapped, np.minimum(rows, n), np.minimum(columns, n))  # outputs for each row of m
    size = np.where(product.accumulate, 8.0, np.where(product.f32, 4.0, 2.0))
    side_by_side = np.where(swapped, rows * pair_b, columns * pair_a)
    megabytes = 2e-6 * k * product.batch
    boxes = np.ceil(k / _BOX) * _BOX != k
    # Boxes of fewer than 64 have only what there is, but for tiles that a cluster shares.
    few = np.where(tiles.share > 0, 0.0, _BOX)
    cut_k, cut_mn = 1e-3 * all_["cut_k_ns"] * (boxes & (k >= few)), 1e-3 * all_["cut_mn_ns"] * k
    in_b = np.minimum(columns, np.where(swapped, columns, n))
    cut = np.where(b_along, cut_k * in_b, cut_mn * np.ceil(columns / _BOX) * (~swapped & (n < columns) & (n >= few)))
    cut = cut + np.where(swapped & ~a_along, cut_mn * np.ceil(rows / _BOX) * ((n < rows) & (n >= few)), 0.0)
    cut = cut + 1e-3 * all_["cut_n_ns"] * k * (np.maximum(columns - n, 0.0) * (b_along & ~swapped))
    tiles_each = along * pair_a * pair_b * product.batch / multiprocessors
    no, one = np.zeros(len(rows)), np.ones(len(rows))
    cache = 2e-6 * k * broken * multiprocessors / all_["cache_tb_s"]
    cut_rows = np.where(a_along, cut_k, 0.0)
    cut_few = np.where(~a_along & ~swapped, cut_mn * np.ceil(rows / _BOX), 0.0)
    prepared = Prepared(
        unit=unit,
        extent=extent,
        each=tiles_each,
        down=(np.where(swapped, along, no), np.where(swapped, no, one)),
        across=(np.where(swapped, no, along), np.where(swapped, one, no)),
        band=np.maximum(np.floor(tiles.band / pair_b), 1.0),
        few=np.where(swapped, _FEW_COLUMNS, 0.0),
        at_once=multiprocessors / (pair_a * pair_b),
        rows=(np.where(varies, 1.0, fixed_rows), np.where(swapped, fixed_rows, rows)),
        from_a=np.where(tiles.share == 1, all_["shared_a"], 1.0),
        pairs_above=np.where(tiles.share > 0, np.inf, np.where(swapped, np.where(n > rows, 0.0, np.inf), rows)),
        from_b=alone_b,
        paired=(all_["pair_a"], all_["pair_b"]),
        gpc=all_["gpc"],
        spread=all_["spread"],
        settled=float((extent * np.maximum(tiles.band, _FEW_COLUMNS)).max()),
        entering=all_["entering"] * 32 / _ENTERING,
        limits=limits,
        step_us=own["step"] * km * broken * steps / _CLOCK,
        tile_us=own["tile"] * (all_["tile_us"] + all_["area_us"] * area * outputs),
        out_us=own["tile"] * all_["out_us"] * other * outputs / 16384,
        few_us=own["tile"] * all_["few_us"] * area * outputs * ((rows > 64) & ~swapped),
        unequal=1 - 1 / (1 + (1 / all_["alone"] - 1) * np.exp(-own["alone"])),
        idle=(2 * (1 - all_["over"]), 1 - 2 * all_["half"], 2 * all_["half"]),
        fixed_us=own["fixed"] * (all_["fixed_us"] + all_["fixed_area_us"] * area),
        bytes_n=megabytes * n,
        bytes_m=megabytes,
        out_m=1e-6 * n * size * product.batch * (1 + all_["segment"] * 128 / side_by_side),
        memory=own["memory"] / all_["tb_s"],
        cache=(cache * pair_a**-0.25, cache * pair_b**-0.25),
        resident=all_["resident_mb"] * product.batch,
        again=all_["again"],
        height=2e-6 * k * rows * pair_b,
        width=2e-6 * k * columns * pair_a,
        cuts=bool(np.any(cut > 0) or np.any(cut_rows > 0) or np.any(cut_few > 0)),
        cut=cut * multiprocessors,
        cut_rows=cut_rows * multiprocessors,
        cut_few=cut_few * multiprocessors,
        cut_from=few,
        shape=own["by_n"] * _centred(n, 8, 2048) + own["by_k"] * _centred(k, 16, 2048),
        by_m=own["by_m"],
        always=(no, no, no),
    )
    return replace(prepared, always=_read(prepared, np.inf))


def _read(p: Prepared, m: Value) -> tuple[Array, Array, Array]:
    """What a tile reads of A and of B for each k, and the µs that it takes."""
    units = np.ceil(np.minimum(m, _MANY) / p.unit)
    down, across = p.down[0] + p.down[1] * units, p.across[0] + p.across[1] * units
    # TileWalk of tile_walk.cuh: two CTAs one behind the other have tiles below one another, but for the last of an odd
    # number of them; or beside one another where columns are few and even.
    few = across <= p.few
    height = np.minimum(p.band, down)
    height[few] = 2.0
    in_pairs = m > p.pairs_above
    beside = few & in_pairs & ~_odd(across)
    a = np.maximum(np.minimum(p.rows[1], m), p.rows[0]) * p.from_a
    a *= 1 - p.paired[0] * beside
    b = (p.paired[1] * (in_pairs & ~beside)) * (1 - _odd(height) / height)
    b = p.from_b * (1 - b)
    entering = (a + b) * p.entering
    entering *= entering
    cycles = np.sqrt(np.sqrt(p.limits + entering * entering))
    return a, b, p.step_us * cycles + p.tile_us + p.out_us * np.minimum(p.extent, m) + p.few_us * (m < p.extent)


def times_us_of_each(prepared: Prepared, rows: Sequence[int]) -> Array:
    """The time of every tile, in µs, for each m, ascending: [m, tiles]. Every value is what `times_us` has; of 32 m it
    takes four times as long."""
    m, slopes = np.array([rows, [_of_m(m) for m in rows]])[:, :, None]
    return _times_us(prepared, m, slopes, rows[-1], rows[0] > prepared.settled)


def times_us(prepared: Prepared, m: Value) -> Array:
    """The time of every tile, in µs."""
    one = isinstance(m, int)
    return _times_us(prepared, m, _of_m(m), m, one and m > prepared.settled)


def _odd(count: Array) -> Flags:
    half = 0.5 * count
    result: Flags = np.floor(half) != half
    return result


def _of_m(m: Value) -> Value:
    return _centred(m, 4, 256)


def _times_us(p: Prepared, m: Value, slope: Value, most_m: Value, settled: bool) -> Array:
    units = np.ceil(m / p.unit)
    each = units * p.each
    most = np.ceil(each)
    a, b, tile = p.always if settled else _read(p, m)
    # Whole walks, and of what is left from `alone` to 1.
    computing = most - each
    computing = np.where(computing < 0.5, p.idle[0] * computing, p.idle[1] + p.idle[2] * computing)
    computing *= p.unequal
    np.subtract(most, computing, out=computing)
    computing = computing * tile
    computing *= computing
    # Rows and columns of tiles that are computed at one time, and with it the CTAs that read one part of B and of A.
    down, across = p.down[0] + p.down[1] * units, p.across[0] + p.across[1] * units
    high = np.minimum(np.where(across <= p.few, 1.0 + _odd(across), p.band), down)
    wide = np.minimum(p.at_once / high, across)
    high = np.minimum(np.maximum(p.at_once / across, high), down)
    operands = p.bytes_n + p.bytes_m * m
    megabytes = operands + p.out_m * m
    if np.any(p.bytes_n + p.bytes_m * most_m > p.resident):
        wave = np.maximum(each, 1.0)
        wave *= high * p.height + wide * p.width
        wave = wave - operands
        megabytes = megabytes + p.again * np.maximum(wave, 0.0) * np.maximum(1 - p.resident / operands, 0.0)
    memory = p.memory * megabytes
    memory *= memory
    memory *= np.where(each <= 0.5, p.spread, most)
    memory /= each
    # Of CTAs that run at one time, those of a GPC have so many for each row, and for each column, of tiles.
    near = p.gpc * np.minimum(each, 1.0)
    for_row, for_column = near / high, near / wide
    cache = p.cache[0] * a / np.sqrt(1 + for_row + for_row * for_row)
    cache = each * (cache + p.cache[1] * b / np.sqrt(1 + for_column + for_column * for_column))
    cache *= cache
    computing *= computing
    memory *= memory
    cache *= cache
    result: Array = p.fixed_us + np.sqrt(np.sqrt(computing + memory + cache))
    if p.cuts:
        rows = np.maximum(np.minimum(p.rows[1], m), p.rows[0])
        result = result + each * (p.cut + p.cut_rows * rows + p.cut_few * ((m < p.extent) & (m >= p.cut_from)))
    result = result * np.exp(p.shape + p.by_m * slope)
    return result


def _centred(size: Value, least: int, centre: int) -> Value:
    """A size's logarithm as the slopes take it: 0 at `centre`, 1 at 16 times that; beyond where sizes were timed it
    stays."""
    if isinstance(size, int):
        return min(max(math.log2(max(size, least) / centre) / 4, -1.5), 1.5)
    return np.clip(np.log2(np.maximum(size, least) / centre) / 4, -1.5, 1.5)


@functools.cache
def _stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text())
    return content


def numbers(labels: tuple[str, ...]) -> Numbers:
    """The numbers of these tiles, from tiles/time_model.json; a tile that has none there has those of OWN."""
    content = _stored()
    rows = [content["tiles"].get(label, list(OWN.values())) for label in labels]
    own = {name: np.array([row[place] for row in rows], dtype=np.float64) for place, name in enumerate(OWN)}
    return Numbers(content["shared"], own)
