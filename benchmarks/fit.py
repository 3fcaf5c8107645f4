"""The numbers that tiles are chosen by, from products drawn at random.

    python -m benchmarks.fit --log fit.jsonl              on the GPU: times of the tiles, seed 1
    python -m benchmarks.fit --log judge.jsonl --seed 2   the same for another set
    python -m benchmarks.fit --fit fit.jsonl --judge judge.jsonl [--write]     anywhere

Fits detkern/cu/time_model.py's numbers to what was timed and says how good the choices by them are on products that they were
not fitted to; --write puts them into detkern/cu/tiles/mma_wgmma.json and mma.json. Both seeds are for this alone: no record of
drawn products may have them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from detkern.contracts import MMA16
from detkern.cu import geometry
from detkern.cu.time_model import CLASSES, Coefficients
from detkern.dtypes import BF16

from . import fit_model, tile_times, timing
from .drawn import FITTING_SEEDS, Drawn, draw
from .drawn_report import RANGES, figures
from .fit_model import Timed
from .forced import problem_of_sizes
from .pool import Pool
from .shapes import Layer, Product

__all__ = ["described", "judged", "log_line", "read", "sampled", "tiles", "timed", "write"]

COUNT = 600
WITHIN = 3.0  # times the least time that the tables predict: they may be wrong before they are fitted
LONGEST_US = 5000.0  # by the reference line: what takes longer says nothing new of a tile, and takes the visit's time
ERRORS_IN_A_ROW = 3
TABLES = Path(geometry.__file__).parent / "tiles"

Fitted = dict[str, dict[str, Coefficients]]


def described(drawn: Drawn) -> dict[str, Any]:
    """A product in a line of a log: enough to make its problem again."""
    product = drawn.product
    return {
        "index": drawn.index, "part": drawn.part, "name": product.layer.name, "op": product.op, "m": product.m,
        "n": product.layer.n, "k": product.layer.k, "f32": drawn.output_f32, "accumulate": drawn.accumulate,
    }  # fmt: skip


def _problem(line: dict[str, Any]) -> Any:
    product = Product(Layer("a", "b", line["n"], line["k"]), line["m"], line["op"], "mma16", "bfloat16")
    return problem_of_sizes(product, line["f32"], line["accumulate"])


def tiles() -> dict[str, Any]:
    """Every tile of the tables by its label."""
    return {str(tile): tile for tile in geometry.tiles_for(MMA16, BF16)}


def sampled(seed: int, count: int) -> list[Drawn]:
    """The products of a log: the first `count` of the seed that do not take too long and whose operands need no gathering."""
    found: list[Drawn] = []
    index = 0
    while len(found) < count:
        drawn = draw(seed, index)
        problem = problem_of_sizes(drawn.product, drawn.output_f32, drawn.accumulate)
        if drawn.product.reference_us <= LONGEST_US and geometry.time_class(problem) in CLASSES:
            found.append(drawn)
        index += 1
    return found


def log_line(drawn: Drawn, times: tile_times.TileTimes) -> dict[str, Any]:
    """A line of a log, but for the device."""
    us, rough = ({label: round(one, 3) for label, one in some.items()} for some in (times.us, times.rough))
    return described(drawn) | {"chosen": times.chosen, "us": us, "rough": rough}


def measure(arguments: argparse.Namespace) -> int:
    """Write the log. Returns how many products were left when the time was over."""
    from detkern.cu.device import describe

    deadline = time.monotonic() + arguments.seconds
    device, facts = timing.Cuda(), describe(0)
    products = sampled(arguments.seed, arguments.count)
    head = {"gpu": facts.name, "multiprocessors": facts.multiprocessors, "seed": arguments.seed}
    failed = written = 0
    with arguments.log.open("w") as log, device.active():
        pool = Pool(products, device.cache_bytes, device.name)
        for place, drawn in enumerate(products):
            if time.monotonic() >= deadline:
                print(f"{written} products timed, {len(products) - place} left: out of time")
                return len(products) - place
            try:
                times, _ = tile_times.measure(
                    device, drawn, pool.sets(drawn), facts.capability, facts.multiprocessors, within=WITHIN
                )
            except Exception as error:
                failed += 1
                print(f"{drawn.product}: {type(error).__name__}: {error}", flush=True)
                if failed == ERRORS_IN_A_ROW:
                    raise
                continue
            failed, written = 0, written + 1
            log.write(json.dumps(head | log_line(drawn, times)) + "\n")
            log.flush()
            best = min(times.us, key=lambda label: times.us[label])
            print(f"{place:4} {drawn.part:8} M {drawn.m:5} {drawn.product.layer.name}: {len(times.rough)} tiles, "
                  f"{best} {times.us[best]:.2f}, chosen {times.us[times.chosen] / times.us[best]:.3f}", flush=True)  # fmt: skip
    print(f"{written} products timed")
    return 0


_LINE = {"gpu": str, "multiprocessors": int, "seed": int, "op": str, "m": int, "n": int, "k": int, "f32": bool,
         "accumulate": bool, "chosen": str, "us": dict, "rough": dict}  # fmt: skip


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log. Raises ValueError where one is not as `measure` writes it."""
    lines = []
    for number, text in enumerate(log.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            known = all(isinstance(line[name], kind) for name, kind in _LINE.items()) and bool(line["us"])
        except (json.JSONDecodeError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(f"{log}:{number} is no line of a log of this program")
        lines.append(line)
    return lines


def timed(lines: Iterable[dict[str, Any]]) -> list[Timed]:
    """The products of a log, with those of their tiles that the tables still have: two or more, the chosen one among them."""
    known = tiles()
    found = []
    for line in lines:
        problem = _problem(line)
        us = {label: one for label, one in line["us"].items() if label in known}
        rough = {label: one for label, one in line["rough"].items() if label in known}
        labels = list(dict.fromkeys((*us, *rough)))
        if len(labels) < 2 or not us or line["chosen"] not in labels:
            continue
        work = {label: geometry.work(problem, known[label], line["multiprocessors"]) for label in labels}
        found.append(Timed(line["m"], geometry.time_class(problem), us, rough, work, line["chosen"]))
    return found


def _classes(tile: Any) -> list[str]:
    """The classes of the load paths that a tile is built for."""
    pairs = ["".join(load.name[0] for load in pair) for pair in tile.loads]
    return [kind for kind in CLASSES if kind.removesuffix("f") in pairs]


def fitted_to(products: Sequence[Timed]) -> Fitted:
    """The numbers of every tile of the tables."""
    wanted = {label: (tile.wave_us, _classes(tile)) for label, tile in tiles().items()}
    return fit_model.fit(fit_model.observations(products), wanted)


def judged(products: Sequence[Timed], fitted: Fitted) -> list[tuple[str, list[float], list[float]]]:
    """(what, regrets of the model, regrets of what the tables chose when the log was made), of all and of parts."""
    model = fit_model.regrets(products, {place: fit_model.choice(one, fitted) for place, one in enumerate(products)})
    tables = fit_model.regrets(products, {place: one.chosen for place, one in enumerate(products)})
    parts = [("all", [True] * len(products))]
    parts += [
        (f"M {first}–{min(last, 16_384)}", [first <= one.m <= last for one in products]) for first, last, _ in RANGES
    ]
    parts += [(kind, [one.kind == kind for one in products]) for kind in CLASSES]
    return [
        (what, [one for one, inside in zip(model, mask, strict=True) if inside],
         [one for one, inside in zip(tables, mask, strict=True) if inside])
        for what, mask in parts
        if any(mask)
    ]  # fmt: skip


def _report(title: str, products: Sequence[Timed], fitted: Fitted) -> None:
    error = fit_model.quality(fit_model.observations(products), fitted)
    print(f"{title}: {len(products)} products, predicted times are off by {100 * error:.1f} % in the weighted mean")
    for what, model, tables in judged(products, fitted):
        ours, theirs = figures(model), figures(tables)
        assert ours is not None
        assert theirs is not None
        print(f"  regret {what:14} {ours.count:5}  mean {ours.mean:.4f}  p90 {ours.p90:.3f}  p99 {ours.p99:.3f}  worst "
              f"{ours.worst:.3f}   as chosen: mean {theirs.mean:.4f}  p99 {theirs.p99:.3f}")  # fmt: skip


def write(path: Path, fitted: Fitted) -> None:
    """Put the numbers into a tile table, a tile a line as before."""
    table = path.stem
    by_place = [str(tile) for tile in geometry.tiles_for(MMA16, BF16) if tile.table == table]
    rows = json.loads(path.read_text())
    if len(rows) != len(by_place):
        raise ValueError(f"{path} has {len(rows)} tiles, and the tables that were fitted {len(by_place)}")
    for row, label in zip(rows, by_place, strict=True):
        row["time"] = {kind: [round(one, 4) for one in numbers] for kind, numbers in fitted[label].items()}
    path.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit what tiles are chosen by, on products drawn at random.")
    parser.add_argument(
        "--log", type=Path, help="time the tiles on this GPU and write them here, a JSON line a product"
    )
    parser.add_argument("--seed", type=int, default=FITTING_SEEDS[0], choices=FITTING_SEEDS, help="of --log")
    parser.add_argument("--count", type=int, default=COUNT, help=f"products of --log (default {COUNT})")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no product of --log after so long")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="LOG", help="fit to these logs")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="LOG", default=[], help="with --fit: judge on these")
    parser.add_argument("--write", action="store_true", help="with --fit: put the numbers into the tile tables")
    arguments = parser.parse_args()
    if (arguments.log is None) == (arguments.fit is None):
        parser.error("either --log or --fit")
    if arguments.log and (arguments.judge or arguments.write):
        parser.error("--judge and --write are for --fit")
    return arguments


def main() -> int:
    """Time, or fit and judge. Status 1 where the time was over before all was timed, or a log cannot be read."""
    arguments = _arguments()
    if arguments.log:
        timing.leave_if(timing.missing())
        return int(measure(arguments) > 0)
    try:
        logs = [line for log in arguments.fit for line in read(log)]
        other = [line for log in arguments.judge for line in read(log)]
    except (OSError, ValueError) as error:
        print(error)
        return 1
    if shared := {line["seed"] for line in logs} & {line["seed"] for line in other}:
        print(f"a fit is judged on another seed than its own: {sorted(shared)} is in both")
        return 1
    products = timed(logs)
    if not products:
        print("nothing was timed that the tables still have")
        return 1
    fitted = fitted_to(products)
    _report("fitted to", products, fitted)
    if judges := timed(other):
        _report("judged on", judges, fitted)
    if arguments.write:
        for table in ("mma_wgmma", "mma"):
            write(TABLES / f"{table}.json", fitted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
