"""How long a tile takes for a product, by a few numbers of that tile: what tiles are chosen by where nothing was measured.

A CTA walks over tiles; a product takes whole rounds of all CTAs, then what is left on some of them, which goes faster a tile the
fewer there are. Meanwhile operands and results come and go through memory. The longer of the two decides, and where both are
about as long each holds the other up. The numbers are fitted on an H200 to products drawn at random and judged on others
(benchmarks/fit.py), and stand in the tile tables; they can change a time, never a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["CLASSES", "Coefficients", "Work", "coefficients_of", "time_us"]

# Kinds of products that one tile has numbers of its own for: load paths of A and B (K_MAJOR or MN_MAJOR), and "f" for float32
# results. The first of each list that a table has is taken.
CLASSES = {
    "KK": ("KK",), "KM": ("KM", "KK"), "MK": ("MK", "MM", "KK"), "MM": ("MM", "KM", "KK"),
    "KKf": ("KKf", "KK"), "KMf": ("KMf", "KM", "KK"), "MKf": ("MKf", "MM", "KK"), "MMf": ("MMf", "MM", "KM", "KK"),
}  # fmt: skip


class Coefficients(NamedTuple):
    """Of a tile and a class. fixed_us: of a grid, from its start to its first products. tile_us: of each tile that a CTA walks
    over, beside its k. wave_us: of 4096 k of such a tile with CTAs on every multiprocessor. alone: of that, what one takes
    where hardly any other CTA runs (0 to 1). memory: of the time that the bytes take at full bandwidth."""

    fixed_us: float
    tile_us: float
    wave_us: float
    alone: float
    memory: float


class Work(NamedTuple):
    """What a tile has to do. tiles: how many, those that a cluster has outside the output too. at_once: CTAs that run at one
    time. k: summands, times what lines that are no multiple of 128 bytes cost. memory_us: of operands and results, once
    each, at full bandwidth."""

    tiles: int
    at_once: int
    k: float
    memory_us: float


def time_us(coefficients: Coefficients, work: Work) -> float:
    """The predicted time in µs."""
    fixed_us, tile_us, wave_us, alone, memory = coefficients
    rounds, left = divmod(work.tiles, work.at_once)
    walks = rounds + (alone + (1.0 - alone) * left / work.at_once if left else 0.0)
    computing = walks * (tile_us + wave_us * work.k / 4096)
    moving = memory * work.memory_us
    # Between their sum and the longer one: the fourth root of the sum of fourth powers.
    computing *= computing
    moving *= moving
    return fixed_us + math.sqrt(math.sqrt(computing * computing + moving * moving))


def coefficients_of(row: Mapping[str, list[float]]) -> tuple[tuple[str, Coefficients], ...]:
    """(class, numbers) from the field "time" of a tile table's row: for every class that the row serves, itself or by another
    one's numbers. Raises ValueError for a class that does not exist."""
    if unknown := set(row) - set(CLASSES):
        raise ValueError(f"{', '.join(sorted(unknown))} is none of {', '.join(CLASSES)}")
    found = []
    for name, places in CLASSES.items():
        place = next((place for place in places if place in row), None)
        if place is not None:
            found.append((name, Coefficients(*row[place])))
    return tuple(found)
