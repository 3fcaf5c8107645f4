"""How long each tile of the tables takes for a drawn product: the regret of a choice, and what a model of the time is
fitted on.

Timing every tile of the table well would take seconds a product. So tiles that the tables predict to take more than
WITHIN times the least are left out (but for the one that detkern chooses), the rest are timed roughly, and those that
came close to the fastest are timed in turn as detkern/measure/timing.py does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detkern.measure import timing
from detkern.measure.drawn import Drawn
from detkern.measure.pool import Set

from .forced import forced_calls, seen

__all__ = ["WITHIN", "TileTimes", "considered", "measure", "regret"]

WITHIN = 2.0  # times the least predicted time
FEWEST = 6  # tiles, however slow they are predicted to be
CLOSE, MOST_CLOSE = 1.15, 8  # times the fastest rough time, and tiles, that are timed in turn
MOST_SETS = 128  # of operands: each tile has to capture a call for every one
TURNS, WARM, TURN_US = 5, 1, 700.0
LAST, LAST_TURNS, LAST_TURN_US = 3, 9, 1500.0  # the fastest that a choice is compared with, again


@dataclass(frozen=True)
class TileTimes:
    """µs by tile label. chosen: the label of detkern's choice. us: of the tiles that were timed in turn. rough: of all
    that were timed. considered: how many tiles can compute the product."""

    chosen: str
    us: dict[str, float]
    rough: dict[str, float]
    considered: int


def considered(
    problem: Any, capability: tuple[int, int], multiprocessors: int, within: float = WITHIN
) -> tuple[Any, list[Any], int]:
    """detkern's choice; the tiles that are timed, that one among them, those that are predicted to be fastest first;
    and how many tiles can compute the problem."""
    from detkern.cu import geometry, tile_choice

    chosen = tile_choice.choose(problem, capability, multiprocessors).tile
    found = tile_choice.candidates(problem, capability, geometry.load_paths(problem))
    predicted = {tile: tile_choice.predicted_us(problem, tile, multiprocessors) for tile in found}
    ordered = sorted(found, key=lambda tile: predicted[tile])
    limit = within * predicted[ordered[0]]
    timed = [tile for place, tile in enumerate(ordered) if place < FEWEST or predicted[tile] <= limit or tile == chosen]
    return chosen, timed, len(found)


def measure(
    device: Any, drawn: Drawn, sets: Sequence[Set], capability: tuple[int, int], multiprocessors: int,
    within: float = WITHIN,
) -> tuple[TileTimes, dict[str, timing.Captured]]:  # fmt: skip
    """The times, and the captured graphs of those tiles that were timed in turn and of the chosen one."""
    problem, views = seen(drawn.product, [one[:3] for one in sets[:MOST_SETS]], drawn.accumulate)
    chosen, timed, count = considered(problem, capability, multiprocessors, within)
    captured, rough = {}, {}
    fastest = float("inf")
    for tile in timed:
        label = str(tile)
        found = timing.capture(device, forced_calls(problem, tile, views))
        rough[label] = timing.rough(device, found)
        fastest = min(fastest, rough[label])
        # Graphs of a tile that is out already are let go at once: of large products each holds much.
        if rough[label] <= CLOSE * fastest or tile == chosen:
            captured[label] = found
    label = str(chosen)
    close = sorted((name for name in captured if rough[name] <= CLOSE * fastest), key=lambda name: rough[name])
    kept = {name: captured[name] for name in dict.fromkeys((*close[:MOST_CLOSE], label))}
    us = _medians(device, kept, TURNS, TURN_US)
    return TileTimes(label, us, rough, count), kept


def _medians(device: Any, captured: Mapping[str, timing.Captured], turns: int, turn_us: float) -> dict[str, float]:
    times = timing.interleave(device, captured, turns, WARM, turn_us)
    return {name: statistics.median(found) for name, found in times.items()}


def regret(device: Any, times: TileTimes, captured: Mapping[str, timing.Captured]) -> tuple[float, str]:
    """The chosen tile's time over the best one's, and which that is.

    The least of many medians is the luckiest one too. So the fastest few are timed once more, with the chosen one, and
    these times decide.
    """
    fastest = sorted(times.us, key=lambda name: times.us[name])[:LAST]
    again = {name: captured[name] for name in dict.fromkeys((*fastest, times.chosen))}
    if len(again) == 1:
        return 1.0, times.chosen
    us = _medians(device, again, LAST_TURNS, LAST_TURN_US)
    best = min(us, key=lambda name: us[name])
    return us[times.chosen] / us[best], best
