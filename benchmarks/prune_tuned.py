"""Which rows of tuned.json are still needed: `python -m benchmarks.prune_tuned LOG [LOG ...]`. Needs no GPU.

LOG: what `python -m benchmarks.tune --log` wrote. A tile that was measured on a whole shape stays only where it takes at most
1 / WINS of the time of the tile that the tables' numbers choose (detkern/cu/time_model.py), in the geometric mean over the logs;
elsewhere the numbers choose as well as the row did. Rows that no log has stay as they are. Writes
detkern/cu/tiles/tuned.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from detkern.contracts import get_contract
from detkern.cu import geometry
from detkern.dtypes import BF16

from . import shapes, tune
from .forced import problem_of_sizes
from .shapes import Product

__all__ = ["WINS", "advantages", "main", "pruned"]

WINS = 1.02


def advantages(
    logs: Iterable[Sequence[dict[str, Any]]], rows: Iterable[dict[str, Any]]
) -> dict[tuple[tune.Key, int], float]:
    """How many times the row's time the numbers' choice takes, by `tune.key`, for what the logs and tuned.json share.

    Tiles that not all logs have, or that the tables do not have, are not chosen from; a row whose tile is one of these has
    no advantage to show and is left out.
    """
    layers = {layer.name: layer for layer in shapes.load().layers}
    tuned = {
        ((row["contract"], row["loads"], row["n"], row["k"]), m): label for row in rows for m, label in row["tiles"]
    }
    runs: dict[Product, list[dict[str, float]]] = {}
    multiprocessors: dict[Product, int] = {}
    for log in logs:
        for line in log:
            product = Product(layers[line["layer"]], line["m"], line["op"], line["contract"], "bfloat16")
            runs.setdefault(product, []).append(line["us"])
            multiprocessors[product] = line["multiprocessors"]
    found: dict[tuple[tune.Key, int], float] = {}
    for product, times in runs.items():
        known = {str(tile): tile for tile in geometry.tiles_for(get_contract(product.contract), BF16)}
        common = set.intersection(*map(set, times)) & known.keys()
        label = tuned.get(tune.key(product))
        if label not in common:
            continue
        problem = problem_of_sizes(product)
        chosen = min(
            sorted(common), key=lambda one: geometry.predicted_us(problem, known[one], multiprocessors[product])
        )
        ratios = [run[chosen] / run[label] for run in times]
        found[tune.key(product)] = math.prod(ratios) ** (1 / len(ratios))
    return found


def pruned(
    rows: Iterable[dict[str, Any]], found: dict[tuple[tune.Key, int], float]
) -> tuple[list[dict[str, Any]], int]:
    """(the rows that are left, how many tiles were dropped)."""
    left, dropped = [], 0
    for row in rows:
        one = row["contract"], row["loads"], row["n"], row["k"]
        tiles = [[m, label] for m, label in row["tiles"] if found.get((one, m), math.inf) >= WINS]
        dropped += len(row["tiles"]) - len(tiles)
        if tiles:
            left.append(row | {"tiles": tiles})
    return left, dropped


def main() -> int:
    """Prune and write. Status 1 where a log cannot be read."""
    parser = argparse.ArgumentParser(description="Drop the rows of tuned.json that the fitted numbers choose as well.")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="of python -m benchmarks.tune --log")
    parser.add_argument("--file", type=Path, default=tune.FILE, help="the file to prune")
    arguments = parser.parse_args()
    content = json.loads(arguments.file.read_text())
    try:
        found = advantages([tune.read(log) for log in arguments.logs], content["rows"])
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    rows, dropped = pruned(content["rows"], found)
    tune.write(arguments.file, content | {"rows": rows})
    print(f"{len(found)} tiles were looked at, {dropped} dropped, {sum(len(row['tiles']) for row in rows)} are left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
