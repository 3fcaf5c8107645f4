"""Choose the tiles of the tensor-core contracts on this GPU:
`python -m benchmarks.tune [--seconds N] [--candidates N]`, or from the logs of runs on several GPUs of one model:
`python -m benchmarks.tune --choose LOG LOG`.

For every layer of shapes.toml at the training m of the tree (and, if asked for, at every m of forward and at the
training m of both gradients), all tiles, or those that the tables predict to be fastest, are timed in turn as timing.py
does, and what was fastest is written to detkern/cu/tiles/tuned.json, which detkern/cu/tuned.py reads: data, with the
GPU, the date and the command. Rows of the file that a run does not measure are kept. On Hopper mma16 does not look
here: its tiles are chosen by a model that benchmarks/fit.py fits.

GPUs of one model, and runs on one GPU, differ by more than the best tiles do. So a table is best chosen from several
logs: the tile whose time over the run's fastest is least in the geometric mean over the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detkern.measure import records, shapes, timing
from detkern.measure.operands import Operands
from detkern.measure.shapes import Product
from detkern.vocabulary.contracts import CONTRACTS

from .forced import forced_call, tiles_of

TURNS, WARM, TURN_US = 5, 1, 700.0
FILE = Path(__file__).resolve().parent.parent / "detkern" / "cu" / "tiles" / "tuned.json"

Key = tuple[str, str, int, int]


def key(product: Product) -> tuple[Key, int]:
    """((contract, load paths, n, k), m) of the problem that a product is, as tuned.json has it."""
    m, n, k = product.m, product.layer.n, product.layer.k
    loads, sizes = {"forward": ("KK", (m, n, k)), "da": ("KM", (m, k, n)), "db": ("MM", (n, k, m))}[product.op]
    return (product.contract, loads, sizes[1], sizes[2]), sizes[0]


def fastest(device: Any, product: Product, operands: Operands, candidates: int | None) -> dict[str, float]:
    """Median µs of the tiles that were timed, by label, the fastest first."""
    rotating = list(zip(*(operands.rotating(product, name) for name in (*product.operands, "out")), strict=True))
    captured = {}
    for tile in tiles_of(product, *rotating[0])[:candidates]:
        captured[str(tile)] = timing.capture(device, [forced_call(product, tile, *one) for one in rotating])
    times = timing.interleave(device, captured, TURNS, WARM, TURN_US)
    found = {label: statistics.median(measured) for label, measured in times.items()}
    return dict(sorted(found.items(), key=lambda one: one[1]))


def least(runs: list[dict[str, float]]) -> str:
    """The label whose times have the least geometric mean, of those that all runs timed: a run that is slower as a
    whole weighs no more.

    runs: µs by label of one product in each run. Raises ValueError where no label is in all of them.
    """
    common = set.intersection(*map(set, runs))
    if not common:
        raise ValueError("no tile was timed in all runs")
    return min((label for label in runs[0] if label in common), key=lambda label: math.prod(run[label] for run in runs))


def chosen(logs: Iterable[list[dict[str, Any]]]) -> dict[Key, dict[int, str]]:
    """The tiles by `key`, from the lines of each run's log. Raises ValueError for a layer that does not exist and for a
    product that stands twice in a log or whose runs have no tile in common."""
    layers = {layer.name: layer for layer in shapes.load().layers}
    runs: dict[Product, list[dict[str, float]]] = {}
    for log in logs:
        seen = set()
        for line in log:
            if line["layer"] not in layers:
                raise ValueError(f"there is no layer {line['layer']!r}")
            product = Product(layers[line["layer"]], line["m"], line["op"], line["contract"], "bfloat16")
            if product in seen:
                raise ValueError(f"{_named(product)} stands twice in one log")
            seen.add(product)
            runs.setdefault(product, []).append(line["us"])
    found: dict[Key, dict[int, str]] = {}
    for product, times in runs.items():
        (one, m) = key(product)
        try:
            found.setdefault(one, {})[m] = least(times)
        except ValueError as error:
            raise ValueError(f"{_named(product)}: {error}") from None
    return found


def _named(product: Product) -> str:
    return f"{product.layer.name} {product.op} {product.contract} m={product.m}"


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log. Raises ValueError where one is not as `measure` writes it."""
    lines = []
    for number, text in enumerate(log.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            known = all(isinstance(line[name], kind) for name, kind in _LINE.items()) and bool(line["us"])
        except (json.JSONDecodeError, KeyError, TypeError):
            known = False
        if not known or line["op"] not in shapes.OPS or line["contract"] not in CONTRACTS:
            raise ValueError(f"{log}:{number} is no line of a log of this program")
        lines.append(line)
    return lines


_LINE = {"gpu": str, "multiprocessors": int, "layer": str, "op": str, "contract": str, "m": int, "us": dict}


def merged(rows: list[dict[str, Any]], found: dict[Key, dict[int, str]]) -> list[dict[str, Any]]:
    """The rows of tuned.json with what was found put in."""
    tiles = {(row["contract"], row["loads"], row["n"], row["k"]): dict(row["tiles"]) for row in rows}
    for one, sizes in found.items():
        tiles.setdefault(one, {}).update(sizes)
    return [
        {"contract": contract, "loads": loads, "n": n, "k": k, "tiles": sorted(sizes.items())}
        for (contract, loads, n, k), sizes in sorted(tiles.items())
    ]


def write(path: Path, content: dict[str, Any]) -> None:
    """Write tuned.json, a row a line."""
    rows = ",\n".join("    " + json.dumps(row) for row in content["rows"])
    head = json.dumps({name: value for name, value in content.items() if name != "rows"}, indent=2)
    path.write_text(head.removesuffix("\n}") + ',\n  "rows": [\n' + rows + "\n  ]\n}\n")


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """(log lines, products left when the time was over)."""
    from detkern.cu.device import describe

    begin = time.monotonic()
    all_shapes = shapes.load()
    device = timing.Cuda()
    facts = describe(0)
    sizes = [int(size) for size in arguments.m.split(",")] if arguments.m else None
    left = 0
    lines = []
    for layer in all_shapes.named(arguments.shapes.split(",")):
        products = shapes.products(layer, all_shapes, arguments.what.split(","), m=sizes)
        if time.monotonic() - begin > arguments.seconds:
            left += len(products)
            continue
        counts = {product: timing.sets(product.bytes, device.cache_bytes) for product in products}
        with device.active():
            operands = Operands(products, counts, device.name)
            for product in products:
                times = fastest(device, product, operands, arguments.candidates)
                lines.append(
                    {
                        "gpu": facts.name, "multiprocessors": facts.multiprocessors, "layer": layer.name,
                        "op": product.op,
                        "contract": product.contract, "m": product.m, "us": times,
                    }
                )  # fmt: skip
                shown = ", ".join(f"{name} {us:.2f}" for name, us in list(times.items())[:3])
                print(f"{_named(product)}: {shown}", flush=True)
        del operands
    print(f"{time.monotonic() - begin:.0f} s, {left} products left")
    return lines, left


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Choose the tiles of the tensor-core contracts on this GPU.")
    parser.add_argument("--output", type=Path, default=FILE, help="the file to write")
    parser.add_argument("--log", type=Path, help="a file for all times, a JSON line a product")
    parser.add_argument(
        "--choose", type=Path, nargs="+", metavar="LOG", help="measure nothing: choose from the logs of several runs"
    )
    parser.add_argument("--shapes", default="*", help="layers, as gemm.py takes them")
    parser.add_argument("--what", default="tree", help="of forward, da, db and tree (default)")
    parser.add_argument("--m", help="values of m, instead of all")
    parser.add_argument(
        "--candidates", type=int, help="tiles that are timed for each product, instead of all that can compute it"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no layer after so long")
    arguments = parser.parse_args()
    if arguments.choose and arguments.log:
        parser.error("--log is for what is measured, and --choose measures nothing")
    return arguments


def main() -> int:
    """Measure or read logs, and write. Status 1 where the time was over before all was measured."""
    arguments = _arguments()
    left = 0
    if arguments.choose:
        try:
            logs = [read(log) for log in arguments.choose]
            found = chosen(logs)
        except (OSError, ValueError) as error:
            print(error)
            return 1
        command = f"python -m benchmarks.tune, in {len(logs)} runs; --choose from their logs"
    else:
        timing.leave_if(timing.missing())
        lines, left = measure(arguments)
        if arguments.log:
            arguments.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        logs, found, command = [lines], chosen([lines]), records.command()
    if not found:
        print("nothing was measured")
        return 1
    content = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"rows": []}
    gpus = {(line["gpu"], line["multiprocessors"]) for log in logs for line in log}
    if "gpu" in content:
        gpus.add((content["gpu"], content["multiprocessors"]))
    if len(gpus) > 1:
        print(f"a table is of one GPU, and {arguments.output} and what was measured are of {sorted(gpus)}")
        return 1
    ((gpu, multiprocessors),) = gpus
    content |= {"gpu": gpu, "multiprocessors": multiprocessors, "date": records.now(), "command": command}
    write(arguments.output, content | {"rows": merged(content["rows"], found)})
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
