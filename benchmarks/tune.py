"""Choose the tiles of the tensor-core contracts on this GPU: `python -m benchmarks.tune [--seconds N] [--candidates N]`,
or from the logs of runs on several GPUs of one model: `python -m benchmarks.tune --choose LOG LOG`.

For every layer of shapes.toml and every m (forward), and at the training m for both gradients and the tree, the tiles that
the tables predict to be fastest are timed in turn as timing.py does, and what was fastest is written to
detkern/cu/tiles/tuned.json, which detkern/cu/tuned.py reads: data, with the GPU, the date and the command. Rows of the file
that a run does not measure are kept.

GPUs of one model, and runs on one GPU, differ by more than the best tiles do. So a table is best chosen from several logs:
the tile whose time over the run's fastest is least in the geometric mean over the runs.
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

from . import records, shapes, timing
from .forced import forced_call, tiles_of
from .operands import Operands
from .shapes import Product

TURNS, WARM, TURN_US = 5, 1, 700.0
FILE = Path(__file__).resolve().parent.parent / "detkern" / "cu" / "tiles" / "tuned.json"

Key = tuple[str, str, int, int]


def key(product: Product) -> tuple[Key, int]:
    """((contract, load paths, n, k), m) of the problem that a product is, as tuned.json has it."""
    m, n, k = product.m, product.layer.n, product.layer.k
    loads, sizes = {"forward": ("KK", (m, n, k)), "da": ("KM", (m, k, n)), "db": ("MM", (n, k, m))}[product.op]
    return (product.contract, loads, sizes[1], sizes[2]), sizes[0]


def fastest(device: Any, product: Product, operands: Operands, candidates: int) -> dict[str, float]:
    """Median µs of the tiles that were timed, by label, the fastest first."""
    rotating = list(zip(*(operands.rotating(product, name) for name in (*product.operands, "out")), strict=True))
    captured = {}
    for tile in tiles_of(product, *rotating[0])[:candidates]:
        captured[str(tile)] = timing.capture(device, [forced_call(product, tile, *one) for one in rotating])
    times = timing.interleave(device, captured, TURNS, WARM, TURN_US)
    found = {label: statistics.median(measured) for label, measured in times.items()}
    return dict(sorted(found.items(), key=lambda one: one[1]))


def least(runs: list[dict[str, float]]) -> str:
    """The label whose time over its run's fastest is least in the geometric mean, of those that all runs timed.

    runs: µs by label of one product in each run. Raises ValueError where no label is in all of them.
    """
    common = set.intersection(*map(set, runs))
    if not common:
        raise ValueError("no tile was timed in all runs")
    fastest_of = [min(run.values()) for run in runs]
    return min(
        (label for label in runs[0] if label in common),
        key=lambda label: math.prod(run[label] / best for run, best in zip(runs, fastest_of, strict=True)),
    )


def chosen(lines: Iterable[dict[str, Any]]) -> dict[Key, dict[int, str]]:
    """The tiles by `key`, from the lines of one or more logs."""
    layers = {layer.name: layer for layer in shapes.load().layers}
    runs: dict[tuple[Key, int], list[dict[str, float]]] = {}
    for line in lines:
        product = Product(layers[line["layer"]], line["m"], line["op"], line["contract"], "bfloat16")
        runs.setdefault(key(product), []).append(line["us"])
    found: dict[Key, dict[int, str]] = {}
    for (one, m), times in runs.items():
        found.setdefault(one, {})[m] = least(times)
    return found


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
                        "gpu": facts.name, "multiprocessors": facts.multiprocessors, "layer": layer.name, "op": product.op,
                        "contract": product.contract, "m": product.m, "us": times,
                    }
                )  # fmt: skip
                shown = ", ".join(f"{name} {us:.2f}" for name, us in list(times.items())[:3])
                print(f"{layer.name} {product.op} {product.contract} m={product.m}: {shown}", flush=True)
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
    parser.add_argument("--what", default="forward,da,db,tree", help="of forward, da, db and tree")
    parser.add_argument("--m", help="values of m, instead of all")
    parser.add_argument("--candidates", type=int, default=8, help="tiles that are timed for each product")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no layer after so long")
    return parser.parse_args()


def main() -> int:
    """Measure or read logs, and write. Status 1 where the time was over before all was measured."""
    arguments = _arguments()
    left = 0
    if arguments.choose:
        lines = [json.loads(line) for log in arguments.choose for line in log.read_text().splitlines()]
        command = f"python -m benchmarks.tune, in {len(arguments.choose)} runs; --choose from their logs"
    elif reason := timing.missing():
        print(f"nothing to measure with: {reason}")
        return 1
    else:
        lines, left = measure(arguments)
        command = "python -m benchmarks.tune"
    if arguments.log:
        arguments.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gpus = {(line["gpu"], line["multiprocessors"]) for line in lines}
    if len(gpus) > 1:
        print(f"tiles are chosen for one GPU, and the logs are of {sorted(gpus)}")
        return 1
    content = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"rows": []}
    for gpu, multiprocessors in gpus:
        content |= {"gpu": gpu, "multiprocessors": multiprocessors, "date": records.now(), "command": command}
    write(arguments.output, content | {"rows": merged(content["rows"], chosen(lines))})
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
