"""Fitting the numbers of detkern/cu/time_model.py to measured times, and judging the choices that follow from them. NumPy alone.

Every tile has five numbers for each class of products. They are fitted by least squares on the logarithm of the time, times
near a product's fastest weighing most, since only there a choice is made; errors beyond a few per cent weigh no more than
linearly; and each number is held near what is expected of it (the table's wave_us, a copy at full bandwidth), as firmly as it
is known beforehand, so that a tile that was seldom timed has numbers that can be compared with the others'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from detkern.cu.time_model import CLASSES, Coefficients, Work, time_us

__all__ = ["Observation", "Timed", "choice", "fit", "fit_one", "observations", "regrets", "start"]

Numbers = npt.NDArray[np.float64]

NOISE = 0.03  # of a measured time, as a logarithm
ROUGH_WEIGHT = 0.3  # of a rough time
LINEAR_FROM = 2.0  # noises: Huber's threshold
STEPS = 60

# How far from what is expected a number may well be: of fixed_us, tile_us, wave_us and memory as logarithms, of `alone` as
# that of its odds.
_EXPECTED = Coefficients(fixed_us=1.4, tile_us=0.4, wave_us=0.0, alone=0.6, memory=1.0)
_DOUBT = np.array([0.3, 1.0, 0.35, 1.5, 0.1])


@dataclass(frozen=True)
class Observation:
    """A measured time: what the tile had to do, µs, and how much it weighs."""

    work: Work
    us: float
    weight: float


@dataclass(frozen=True)
class Timed:
    """A product whose tiles were timed. m: tokens. kind: of CLASSES. us: in turn, and rough: roughly, by tile label. work: of each
    of them. chosen: what detkern's tables chose."""

    m: int
    kind: str
    us: Mapping[str, float]
    rough: Mapping[str, float]
    work: Mapping[str, Work]
    chosen: str

    def time(self, label: str) -> float:
        """The better known of a tile's times."""
        return self.us.get(label) or self.rough[label]

    @property
    def fastest(self) -> float:
        """µs of the tile that was fastest in turn."""
        return min(self.us.values())


def observations(products: Iterable[Timed]) -> dict[tuple[str, str], list[Observation]]:
    """By tile label and class."""
    found: dict[tuple[str, str], list[Observation]] = {}
    for product in products:
        for label, work in product.work.items():
            us = product.time(label)
            weight = (product.fastest / us) ** 2 * (1.0 if label in product.us else ROUGH_WEIGHT)
            found.setdefault((label, product.kind), []).append(Observation(work, us, weight))
    return found


def start(wave_us: float) -> Coefficients:
    """What is expected of a tile before anything was measured."""
    return _EXPECTED._replace(wave_us=wave_us)


def _pack(coefficients: Coefficients) -> Numbers:
    fixed, tile, wave, alone, memory = coefficients
    return np.array([math.log(fixed), math.log(tile), math.log(wave), math.log(alone / (1 - alone)), math.log(memory)])


def _unpack(numbers: Numbers) -> Coefficients:
    fixed, tile, wave, alone, memory = (float(number) for number in numbers)
    return Coefficients(math.exp(fixed), math.exp(tile), math.exp(wave), 1 / (1 + math.exp(-alone)), math.exp(memory))


def _errors(numbers: Numbers, seen: Sequence[Observation]) -> Numbers:
    """Of the predictions, in noises."""
    coefficients = _unpack(numbers)
    return np.array([math.log(time_us(coefficients, one.work) / one.us) / NOISE for one in seen])


def fit_one(seen: Sequence[Observation], expected: Coefficients) -> Coefficients:
    """The numbers of one tile and class, by Levenberg's and Marquardt's method."""
    if not seen:
        return expected
    centre = _pack(expected)
    weights = np.array([one.weight for one in seen])

    def cost(errors: Numbers, numbers: Numbers) -> float:
        size = np.abs(errors)
        huber = np.where(size <= LINEAR_FROM, size**2, LINEAR_FROM * (2 * size - LINEAR_FROM))
        return float((weights * huber).sum() + (((numbers - centre) / _DOUBT) ** 2).sum())

    numbers, damping = centre.copy(), 1e-2
    errors = _errors(numbers, seen)
    best = cost(errors, numbers)
    for _ in range(STEPS):
        slopes = np.empty((len(seen), len(numbers)))
        for place in range(len(numbers)):
            moved = numbers.copy()
            moved[place] += 1e-4
            slopes[:, place] = (_errors(moved, seen) - errors) / 1e-4
        held = weights * np.minimum(1.0, LINEAR_FROM / np.maximum(np.abs(errors), 1e-12))
        curvature = slopes.T @ (held[:, None] * slopes) + np.diag(1 / _DOUBT**2)
        gradient = slopes.T @ (held * errors) + (numbers - centre) / _DOUBT**2
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
        step = np.clip(step, -0.5, 0.5)
        tried = _errors(numbers + step, seen)
        value = cost(tried, numbers + step)
        if value < best:
            converged = best - value < 1e-7 * best
            numbers, errors, best, damping = numbers + step, tried, value, max(damping / 3, 1e-9)
            if converged:
                break
        else:
            damping *= 5
            if damping > 1e8:
                break
    return _unpack(numbers)


def fit(
    seen: Mapping[tuple[str, str], Sequence[Observation]], tiles: Mapping[str, tuple[float, Iterable[str]]]
) -> dict[str, dict[str, Coefficients]]:
    """The numbers by tile label and class.

    tiles: wave_us and the classes of each tile. What is expected of a class is what was fitted of the one that stands for it
    in CLASSES, so that products of a kind that was seldom drawn begin from those of another.
    """
    found: dict[str, dict[str, Coefficients]] = {}
    for label, (wave_us, kinds) in tiles.items():
        own: dict[str, Coefficients] = {}
        wanted = set(kinds)
        for kind, places in CLASSES.items():
            if kind in wanted:
                expected = next((own[place] for place in places[1:] if place in own), start(wave_us))
                # Numbers at the ends of what can be written down would have no logarithm.
                expected = expected._replace(alone=min(max(expected.alone, 0.02), 0.98))
                own[kind] = fit_one(seen.get((label, kind), ()), expected)
        found[label] = own
    return found


def choice(product: Timed, fitted: Mapping[str, Mapping[str, Coefficients]]) -> str:
    """The tile that the numbers predict to be fastest of those that were timed."""
    return min(product.work, key=lambda label: time_us(fitted[label][product.kind], product.work[label]))


def regrets(products: Iterable[Timed], chosen: Mapping[int, str]) -> list[float]:
    """The chosen tile's time over the fastest one's, of each product. chosen: labels by place."""
    return [product.time(chosen[place]) / product.fastest for place, product in enumerate(products)]


def quality(seen: Mapping[tuple[str, str], Sequence[Observation]], fitted: Mapping[str, Mapping[str, Any]]) -> float:
    """The weighted mean size of the error of a predicted time, as a logarithm."""
    total = weight = 0.0
    for (label, kind), some in seen.items():
        for one in some:
            total += one.weight * abs(math.log(time_us(fitted[label][kind], one.work) / one.us))
            weight += one.weight
    return total / weight
