"""Choose the tiles of the tensor-core contracts on this GPU: `python -m benchmarks.tune [--seconds N] [--candidates N]`.

For every layer of shapes.toml and every m (forward), and at the training m for both gradients and the tree, the tiles that
the tables predict to be fastest are timed in turn as timing.py does, and what was fastest is written to
detkern/cu/tiles/tuned.json, which detkern/cu/tuned.py reads: data, with the GPU, the date and the command. Rows of the file
that a run does not measure are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
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


def main() -> int:
    """Measure and write. Status 1 where the time was over before all was measured."""
    parser = argparse.ArgumentParser(description="Choose the tiles of the tensor-core contracts on this GPU.")
    parser.add_argument("--output", type=Path, default=FILE, help="the file to write")
    parser.add_argument("--log", type=Path, help="a file for all times, a JSON line a product")
    parser.add_argument("--shapes", default="*", help="layers, as gemm.py takes them")
    parser.add_argument("--what", default="forward,da,db,tree", help="of forward, da, db and tree")
    parser.add_argument("--m", help="values of m, instead of all")
    parser.add_argument("--candidates", type=int, default=8, help="tiles that are timed for each product")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no layer after so long")
    arguments = parser.parse_args()

    from detkern.cu.device import describe

    begin = time.monotonic()
    all_shapes = shapes.load()
    device = timing.Cuda()
    facts = describe(0)
    sizes = [int(size) for size in arguments.m.split(",")] if arguments.m else None
    found: dict[Key, dict[int, str]] = {}
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
                (one, m), label = key(product), next(iter(times))
                found.setdefault(one, {})[m] = label
                line = {"layer": layer.name, "op": product.op, "contract": product.contract, "m": m, "us": times}
                lines.append(json.dumps(line))
                shown = ", ".join(f"{name} {us:.2f}" for name, us in list(times.items())[:3])
                print(f"{layer.name} {product.op} {product.contract} m={m}: {shown}", flush=True)
        del operands
    content = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"rows": []}
    content |= {
        "gpu": facts.name,
        "multiprocessors": facts.multiprocessors,
        "date": records.now(),
        "command": "python -m benchmarks.tune",
    }
    write(arguments.output, content | {"rows": merged(content["rows"], found)})
    if arguments.log:
        arguments.log.write_text("\n".join(lines) + "\n")
    print(f"{time.monotonic() - begin:.0f} s, {left} products left")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
