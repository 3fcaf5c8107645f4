"""Times of tiles on drawn products, which `python -m benchmarks.fit` fits and judges what tiles are chosen by:

    python -m benchmarks.fit_log --seed 1 --output tile-times-seed1.jsonl [--count N] [--seconds N] [--tokens N]
        [--kinds KIND ...] [--within X]

Of each product the tiles that are predicted to take at most WITHIN times the least are timed in turn
(detkern/measure/timing.py), with cuBLAS's 16-bit product beside them. A line of the log is a product; benchmarks/fit.py
says what it holds. Seeds are FITTING_SEEDS of drawn.py alone: no record is of these. The logs that the table in the
package is fitted to are tile-times-seed*.jsonl under benchmarks/results/h200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from detkern.measure import peers, timing
from detkern.measure.drawn import FITTING_SEEDS, Drawn, draw
from detkern.measure.pool import Pool, Set

from .forced import forced_calls, seen
from .tile_times import MOST_SETS, considered

__all__ = ["line_of", "products"]

WITHIN = 2.0
LARGEST_BYTES = 3 * 10**9  # of a product: larger ones say little that others do not, and take long
TURNS, WARM, TURN_US = 4, 1, 400.0


def products(seed: int, count: int, tokens: int = 1, kinds: Sequence[str] = ()) -> Iterator[Drawn]:
    """The first `count` products of a seed, without the largest, those of fewer tokens and, if any are given, of other
    kinds."""
    drawn = (draw(seed, index) for index in range(count))
    return (one for one in drawn if one.bytes <= LARGEST_BYTES and one.m >= tokens and (not kinds or one.kind in kinds))


def line_of(seed: int, drawn: Drawn, loads: str, chosen: str, us: dict[str, float]) -> dict[str, Any]:
    """A line of the log. us: medians of the tiles by label, and of "cublas"."""
    m, n, k = drawn.sizes
    cublas = us["cublas"]
    return {
        "seed": seed, "index": drawn.index, "part": drawn.part, "layer": drawn.product.layer.name, "loads": loads,
        "m": m, "n": n, "k": k, "f32": drawn.output_f32, "acc": drawn.accumulate, "cublas": round(cublas, 3),
        "chosen": chosen, "us": {label: round(one, 3) for label, one in us.items() if label != "cublas"},
    }  # fmt: skip


def measure(device: Any, seed: int, drawn: Drawn, sets: list[Set], within: float = WITHIN) -> dict[str, Any] | None:
    """The line of a product; None where no tile of Hopper's kernels computes it."""
    from detkern.cu import geometry
    from detkern.cu.device import describe

    facts = describe(0)
    sets = sets[:MOST_SETS]
    if drawn.accumulate:
        for one in sets:
            one.out.zero_()
    problem, views = seen(drawn.product, [one[:3] for one in sets], drawn.accumulate)
    chosen, timed, _ = considered(problem, facts.capability, facts.multiprocessors, within)
    tiles = [tile for tile in timed if tile.by_tma]
    if not tiles:
        return None
    cublas, *_ = peers.here(())[0]
    calls = [cublas.bind(drawn.product, one.a, one.b, one.peer_out) for one in sets]
    captured = {cublas.name: timing.capture(device, calls)}
    for tile in tiles:
        captured[str(tile)] = timing.capture(device, forced_calls(problem, tile, views))
    times = timing.interleave(device, captured, TURNS, WARM, TURN_US)
    loads = "".join(load.name[0] for load in geometry.load_paths(problem))
    return line_of(seed, drawn, loads, str(chosen), {name: statistics.median(one) for name, one in times.items()})


def main() -> int:
    """Time and write. Status 1 where the time was over before all was timed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Time the tiles of Hopper's kernels on drawn products.")
    parser.add_argument("--seed", type=int, choices=FITTING_SEEDS, default=FITTING_SEEDS[0])
    parser.add_argument("--count", type=int, default=900, help="products (default 900)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no product after so many")
    parser.add_argument("--kinds", nargs="+", default=(), help="of layers alone, as lora_a")
    parser.add_argument("--tokens", type=int, default=1, help="none of fewer")
    parser.add_argument(
        "--within", type=float, default=WITHIN, help=f"times the least predicted time (default {WITHIN})"
    )
    parser.add_argument("--output", type=Path, help="the log to write (default tile-times-seed<SEED>.jsonl)")
    arguments = parser.parse_args()
    timing.leave_if(timing.missing())
    wanted = list(products(arguments.seed, arguments.count, arguments.tokens, arguments.kinds))
    device = timing.Cuda()
    pool = Pool(wanted, device.cache_bytes, device.name)
    output = arguments.output or Path(f"tile-times-seed{arguments.seed}.jsonl")
    begin, done = time.monotonic(), 0
    with device.active(), output.open("w") as log:
        for drawn in itertools.takewhile(lambda _: time.monotonic() - begin < arguments.seconds, wanted):
            if (line := measure(device, arguments.seed, drawn, pool.sets(drawn), arguments.within)) is not None:
                print(json.dumps(line, separators=(",", ":")), file=log, flush=True)
            done += 1
    print(f"{done} of {len(wanted)} products in {time.monotonic() - begin:.0f} s")
    return int(done < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
