"""Fitting the numbers of detkern/cu/time_model.py to measured times. NumPy alone.

Least squares on the logarithm of the time by Levenberg's and Marquardt's method, all numbers at once. Times near a
product's fastest weigh most, since only there a choice is made; what all predictions for one product are off by
together counts for less, since it changes no choice; errors beyond a few per cent weigh no more than linearly; and each
number is held near what is expected of it, so that a tile that was seldom timed has numbers that can be compared with
the others': in a second round, near those of the tile that is most like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from detkern.cu import time_model
from detkern.cu.gemm_tile import Tile
from detkern.cu.tile_choice import model_shapes

__all__ = ["Times", "fit", "flatten", "predicted", "regrets"]

Array = npt.NDArray[np.float64]

NOISE = 0.02  # of a measured time, as a logarithm
LINEAR_FROM = 2.5  # noises: Huber's threshold
NEAR = 6.0  # a time weighs (fastest / it) to this power
COMMON = 0.9  # of what a product's predictions are off by together, the part that does not count
STEPS = 12
SELDOM = 30  # times of a tile: with fewer, what is expected of it are the numbers of another one

# Numbers between 0 and 1 are fitted as logits, others as logarithms; slopes and `alone` of a tile as they are.
_LOGITS = frozenset(("spread", "pair_a", "pair_b", "shared_a", "shared_b", "alone", "half", "over"))
_PLAIN = frozenset(("alone", "by_m", "by_n", "by_k"))
# How far from where it begins a number may well be, in these scales.
_DOUBT_SHARED = {
    "tensor": 0.2, "shared": 0.3, "entering": 0.2, "chain": 0.2, "pair_a": 1.0, "pair_b": 1.0, "shared_a": 1.0,
    "shared_b": 1.0, "gpc": 0.5, "km": 0.2, "mm": 0.2, "broken_a": 0.3, "broken_b": 0.3, "padding": 1.0,
    "fixed_us": 0.5, "fixed_area_us": 1.0, "tile_us": 1.0, "out_us": 1.0, "area_us": 1.0, "few_us": 1.0,
    "f32": 0.5, "accumulate": 0.5, "alone": 1.0, "spread": 1.0, "half": 1.0, "over": 1.0, "tb_s": 0.15,
    "segment": 1.0, "cache_tb_s": 0.4, "again": 1.0, "resident_mb": 0.7, "cut_k_ns": 1.0, "cut_mn_ns": 1.0,
    "cut_n_ns": 2.0,
}  # fmt: skip
_DOUBT_OWN = {
    "step": 0.08, "tile": 0.7, "fixed": 0.25, "alone": 0.5, "memory": 0.06, "by_m": 0.08, "by_n": 0.08, "by_k": 0.08
}  # fmt: skip
_SLOPES = ("by_m", "by_n", "by_k")
_DOUBT_TREND = 0.05  # of a slope, for what tiles have in common


@dataclass(frozen=True)
class Times:
    """Measured times, one a place: of which product (numbered from 0), by which tile (its place in the table), µs."""

    product: npt.NDArray[np.int64]
    tile: npt.NDArray[np.int64]
    us: Array
    m: Array
    model: time_model.Product
    shapes: time_model.TileShapes


@dataclass(frozen=True)
class _Point:
    """Where a fit is: numbers of all tiles, trends of the slopes by what tiles have in common, and each tile's own."""

    shared: Array
    trends: Array
    own: Array

    def numbers(self, trends: Array, places: npt.NDArray[np.int64] | None = None) -> time_model.Numbers:
        shared = {
            name: float(1 / (1 + math.exp(-one)) if name in _LOGITS else math.exp(one))
            for name, one in zip(time_model.SHARED, self.shared, strict=True)
        }
        own = {}
        for place, name in enumerate(time_model.OWN):
            one = self.own[:, place]
            if name in _SLOPES:
                one = one + trends @ self.trends[_SLOPES.index(name)]
            one = one if name in _PLAIN else np.exp(one)
            own[name] = one if places is None else one[places]
        return time_model.Numbers(shared, own)


def flatten(lines: Sequence[dict[str, Any]], tiles: Sequence[Tile]) -> Times:
    """The times of a log's lines by tiles of the table; lines as `benchmarks.fit.read` returns them."""
    place = {str(tile): number for number, tile in enumerate(tiles)}
    rows = [
        (number, place[label], us, line["m"], line["n"], line["k"], line["loads"][0] == "K", line["loads"][1] == "K",
         _broken(line, 0), _broken(line, 1), line["f32"], line["acc"])
        for number, line in enumerate(lines) for label, us in line["us"].items()
        if label in place
    ]  # fmt: skip
    product, tile, us, m, n, k, k_a, k_b, broken_a, broken_b, f32, accumulate = map(np.array, zip(*rows, strict=True))
    model = time_model.Product(
        n.astype(float), k.astype(float), (k_a, k_b), (broken_a, broken_b), f32.astype(bool), accumulate.astype(bool)
    )
    shapes = time_model.TileShapes(*(one[tile] for one in model_shapes(tiles)))
    return Times(product, tile, us.astype(float), m.astype(float), model, shapes)


def _broken(line: dict[str, Any], operand: int) -> bool:
    """Whether the lines of a contiguous 16-bit operand are no multiple of 128 bytes."""
    return bool((line["k"] if line["loads"][operand] == "K" else line["mn"[operand]]) * 2 % 128)


def predicted(times: Times, numbers: time_model.Numbers, multiprocessors: int) -> Array:
    """µs in each place. numbers: of the table's tiles."""
    own = {name: one[times.tile] for name, one in numbers.own.items()}
    prepared = time_model.prepare(times.shapes, numbers._replace(own=own), times.model, multiprocessors)
    return time_model.times_us(prepared, times.m)


def regrets(times: Times, us: Array) -> tuple[Array, npt.NDArray[np.int64]]:
    """For each product, the time of the tile that `us` predicts to be fastest over the fastest tile's, and that tile's
    place."""
    order = np.lexsort((us, times.product))
    first = order[np.concatenate([[True], np.diff(times.product[order]) > 0])]
    return times.us[first] / _fastest(times)[times.product[first]], times.tile[first]


def _fastest(times: Times) -> Array:
    fastest = np.full(times.product.max() + 1, np.inf)
    np.minimum.at(fastest, times.product, times.us)
    return fastest


def _trends(tiles: Sequence[Tile]) -> Array:
    """What the slopes of tiles may have in common: by size, orientation and what a cluster shares."""
    shapes = model_shapes(tiles)
    columns = (
        np.log2(shapes.rows / 64), np.log2(shapes.columns / 64), np.log2(shapes.stage_k / 64) - 0.5,
        shapes.swapped * 1.0, (shapes.share == 1) * 1.0, (shapes.share == 2) * 1.0,
        np.array([float(tile.get("IN_TURN", 0)) for tile in tiles]),
    )  # fmt: skip
    return np.stack(columns, 1)


def fit(times: Times, tiles: Sequence[Tile], multiprocessors: int) -> time_model.Numbers:
    """The numbers of all tiles of the table."""
    trends = _trends(tiles)
    begin = [math.log(one / (1 - one)) if name in _LOGITS else math.log(one) for name, one in time_model.SHARED.items()]
    sizes = (len(begin), len(_SLOPES) * trends.shape[1])
    centre = np.concatenate([begin, np.zeros(sizes[1] + len(tiles) * len(time_model.OWN))])
    of_all = [_DOUBT_SHARED[name] for name in time_model.SHARED]
    doubt = np.concatenate([of_all, np.full(sizes[1], _DOUBT_TREND), np.tile(list(_DOUBT_OWN.values()), len(tiles))])

    def point(numbers: Array) -> _Point:
        shared, common, own = np.split(numbers, np.cumsum(sizes))
        return _Point(shared, common.reshape(len(_SLOPES), -1), own.reshape(len(tiles), -1))

    def logarithms(numbers: Array) -> Array:
        return np.log(predicted(times, point(numbers).numbers(trends), multiprocessors))

    def fitted(begin: Array) -> Array:
        return _least_squares(times, logarithms, centre, begin, doubt, sum(sizes), len(time_model.OWN))

    found = fitted(centre)
    often = np.bincount(times.tile, minlength=len(tiles)) >= SELDOM
    if often.any() and not often.all():
        known = np.flatnonzero(often)
        like = [place if often[place] else min(known, key=lambda other: _unlike(tiles[place], tiles[other]))
                for place in range(len(tiles))]  # fmt: skip
        own = found[sum(sizes) :].reshape(len(tiles), -1)
        expected = np.where(often[:, None], centre[sum(sizes) :].reshape(own.shape), own[like])
        centre = np.concatenate([centre[: sum(sizes)], expected.ravel()])
        found = fitted(np.concatenate([found[: sum(sizes)], np.where(often[:, None], own, own[like]).ravel()]))
    return point(found).numbers(trends)


def _unlike(tile: Tile, other: Tile) -> float:
    """How far tiles are from one another: in powers of two of their sides, and by what else their kernels differ in."""
    sides = sum(abs(math.log2(tile[side] / other[side])) for side in ("TILE_M", "TILE_N", "TILE_K"))
    ways = (tile.swapped != other.swapped, tile.shares != other.shares, tile["IN_TURN"] != other["IN_TURN"])
    return sides + 2 * sum(ways) + 0.1 * (tile.f32_out != other.f32_out)


def _least_squares(
    times: Times, logarithms: Callable[[Array], Array], centre: Array, begin: Array, doubt: Array, common: int, own: int
) -> Array:
    """The numbers, from `begin` on; held near `centre`. common: the numbers before those of the tiles, of which there
    are `own` each."""
    places = np.arange(len(times.us))
    weights = (_fastest(times)[times.product] / times.us) ** NEAR
    of_product = np.bincount(times.product, weights)
    measured = np.log(times.us)

    def without_common(errors: Array) -> Array:
        mean = np.bincount(times.product, weights * errors) / of_product
        result: Array = errors - COMMON * mean[times.product]
        return result

    def evaluated(numbers: Array) -> tuple[Array, float]:
        errors = without_common(logarithms(numbers) - measured) / NOISE
        size = np.abs(errors)
        huber = np.where(size < LINEAR_FROM, size**2, LINEAR_FROM * (2 * size - LINEAR_FROM))
        return errors, float((weights * huber).sum() + (((numbers - centre) / doubt) ** 2).sum())

    def slopes(numbers: Array) -> npt.NDArray[np.float32]:
        base = logarithms(numbers)
        result = np.zeros((len(places), len(numbers)), np.float32)
        for column in range(common):
            moved = numbers.copy()
            moved[column] += 1e-4
            result[:, column] = without_common(logarithms(moved) - base) / 1e-4 / NOISE
        means = np.zeros((len(of_product), len(numbers) - common), np.float32)
        for column in range(own):  # a place has its tile's numbers alone
            moved = numbers.copy()
            moved[common + column :: own] += 1e-4
            change = (logarithms(moved) - base) / 1e-4 / NOISE
            columns = times.tile * own + column
            result[places, common + columns] = change
            np.add.at(means, (times.product, columns), weights / of_product[times.product] * change)
        result[:, common:] -= np.float32(COMMON) * means[times.product]
        return result

    numbers, damping = begin.copy(), 1e-2
    errors, cost = evaluated(numbers)
    for _ in range(STEPS):
        held = weights * np.minimum(1.0, LINEAR_FROM / np.maximum(np.abs(errors), 1e-9))
        jacobian = slopes(numbers)
        weighted = jacobian * held[:, None].astype(np.float32)
        curvature = (jacobian.T @ weighted).astype(np.float64) + np.diag(1 / doubt**2)
        gradient = (weighted.T @ errors.astype(np.float32)).astype(np.float64) + (numbers - centre) / doubt**2
        for _ in range(6):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            moved = numbers + np.clip(step, -0.5, 0.5)
            tried, value = evaluated(moved)
            if value < cost:
                break
            damping *= 5
        else:
            return numbers
        converged = cost - value < 1e-4 * cost
        numbers, errors, cost, damping = moved, tried, value, max(damping / 4, 1e-7)
        if converged:
            break
    return numbers
