"""The numbers that tiles of mma_wgmma.json are chosen by, from times of products drawn at random.

    python -m benchmarks.fit --fit fit.jsonl ... --judge judge.jsonl ... [--write]

Fits detkern/cu/time_model.py's numbers to the first logs and says how good the choices by them are on the products of
the others, of another seed; --folds N says it of N parts of the fitted logs, each judged by a fit to the rest. --write
puts the numbers into detkern/cu/tiles/time_model.json. A line of a log is a product: seed, part, loads (K or M for a
and b), m, n, k, f32, acc (accumulated), chosen (the label of detkern's choice) and us (the median µs by tile label).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detkern.cu import gemm_tile, time_model
from detkern.vocabulary.contracts import MMA16
from detkern.vocabulary.dtypes import BF16

from .fit_model import fit, flatten, predicted, regrets

__all__ = ["content", "judged", "read", "table", "useful"]

FILE = Path(time_model.__file__).parent / "tiles" / "time_model.json"
MULTIPROCESSORS = 132
RANGES = ((1, 64), (65, 256), (257, 1023), (1024, 2**31))  # of tokens

_LINE = {"seed": int, "part": str, "loads": str, "m": int, "n": int, "k": int, "f32": bool, "acc": bool, "chosen": str,
         "us": dict}  # fmt: skip


def table() -> list[gemm_tile.Tile]:
    """The tiles that are fitted."""
    return [tile for tile in gemm_tile.tiles_for(MMA16, BF16) if tile.table == "mma_wgmma"]


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log. Raises ValueError where one is not of a product."""
    lines = []
    for number, text in enumerate(log.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            known = all(isinstance(line[name], kind) for name, kind in _LINE.items())
        except (json.JSONDecodeError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(f"{log}:{number} is no line of a log of this program")
        lines.append(line)
    return lines


def useful(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that say something of a choice: two or more tiles that the table still has."""
    labels = {str(tile) for tile in table()}
    kept = [line | {"us": {name: us for name, us in line["us"].items() if name in labels}} for line in lines]
    return [line for line in kept if len(line["us"]) > 1]


def judged(lines: Sequence[dict[str, Any]], numbers: time_model.Numbers) -> list[float]:
    """The regret of the model's choice for each line."""
    times = flatten(lines, table())
    return [float(one) for one in regrets(times, predicted(times, numbers, MULTIPROCESSORS))[0]]


def folded(lines: Sequence[dict[str, Any]], folds: int) -> list[float]:
    """The regret for each line by a fit to the other parts."""
    part = np.random.default_rng(0).integers(folds, size=len(lines))
    found = np.zeros(len(lines))
    for one in range(folds):
        rest = [line for line, number in zip(lines, part, strict=True) if number != one]
        own = [line for line, number in zip(lines, part, strict=True) if number == one]
        found[part == one] = judged(own, fit(flatten(rest, table()), table(), MULTIPROCESSORS))
    return [float(one) for one in found]


def _tokens(line: dict[str, Any]) -> int:
    return int(line["k"] if line["part"].startswith("db") else line["m"])


def report(title: str, lines: Sequence[dict[str, Any]], found: Sequence[float]) -> None:
    """Print the regrets by part and tokens, beside those of what detkern chose when the log was made."""
    then = [line["us"].get(line["chosen"], np.nan) / min(line["us"].values()) for line in lines]
    print(f"{title}: {len(lines)} products")
    groups = [("all", "", (1, 2**31))]
    groups += [("", part, size) for part in dict.fromkeys(line["part"] for line in lines) for size in RANGES]
    for name, part, (first, last) in groups:
        inside = [part in ("", line["part"]) and first <= _tokens(line) <= last for line in lines]
        now = np.array(found)[inside]
        if len(now):
            before = float(np.nanmean(np.array(then)[inside]))
            p90, p99 = np.quantile(now, [0.9, 0.99])
            print(f"  {name or part + f' from {first}':18} {len(now):5}  mean {now.mean():.4f}  p90 {p90:.3f}  "
                  f"p99 {p99:.3f}  worst {now.max():.3f}   as chosen: mean {before:.4f}")  # fmt: skip


def content(numbers: time_model.Numbers) -> dict[str, Any]:
    """What time_model.json holds."""
    tiles = {
        str(tile): [round(float(numbers.own[name][place]), 4) for name in time_model.OWN]
        for place, tile in enumerate(table())
    }
    return {
        "shared": {name: float(f"{one:.4g}") for name, one in numbers.shared.items()},
        "own": list(time_model.OWN),
        "tiles": tiles,
    }


def write(path: Path, whole: dict[str, Any]) -> None:
    """A tile a line."""
    head = json.dumps({name: one for name, one in whole.items() if name != "tiles"}, indent=2)
    rows = ",\n".join(f"    {json.dumps(label)}: {json.dumps(one)}" for label, one in whole["tiles"].items())
    path.write_text(head.removesuffix("\n}") + ',\n  "tiles": {\n' + rows + "\n  }\n}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit what tiles are chosen by, on products drawn at random.")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="LOG", required=True, help="fit to these logs")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="LOG", default=[], help="judge on these")
    parser.add_argument("--folds", type=int, default=0, help="judge on so many parts of the fitted logs too")
    parser.add_argument("--write", action="store_true", help=f"put the numbers into {FILE.name}")
    return parser.parse_args()


def main() -> int:
    """Fit and judge. Status 1 where a log cannot be read or is on both sides."""
    arguments = _arguments()
    try:
        fitted_to = useful([line for log in arguments.fit for line in read(log)])
        other = useful([line for log in arguments.judge for line in read(log)])
    except (OSError, ValueError) as error:
        print(error)
        return 1
    if common := {line["seed"] for line in fitted_to} & {line["seed"] for line in other}:
        print(f"a fit is judged on another seed than its own: {sorted(common)} is in both")
        return 1
    if not fitted_to:
        print("nothing was timed that the table still has")
        return 1
    numbers = fit(flatten(fitted_to, table()), table(), MULTIPROCESSORS)
    report("fitted to", fitted_to, judged(fitted_to, numbers))
    if other:
        report("judged on", other, judged(other, numbers))
    if arguments.folds:
        report(f"judged in {arguments.folds} parts", fitted_to, folded(fitted_to, arguments.folds))
    if arguments.write:
        write(FILE, content(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
