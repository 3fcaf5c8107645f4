"""The visit of `python -m benchmarks.gemm --drawn [SEED]`: which seed it measures, what is left of it, and each product's row.

A record draws a seed of its own and keeps it until all its products are measured: a set cannot be left for a kinder one. A
record of other kernels, tables, drivers or packages is no longer continued: the next visit draws a new seed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import drawn_report, gemm, peers, records, tile_times, timing
from .drawn import FITTING_SEEDS, Drawn, draw
from .forced import problem_of_sizes
from .pool import Pool, Set

__all__ = ["COUNT", "REGRET", "Plan", "measure", "plan", "run", "sources", "sweep"]

COUNT = 4000  # products: 2,000 of them forward with a log-uniform M
REGRET = 200  # the first of them, which are like the others: all tiles are timed too
SAVE_EVERY = 50  # rows

LONG_US = 5000.0  # by the reference line: of products that take longer fewer turns are timed
FEW_TURNS, FEW_WARM = 3, 1
ERRORS_IN_A_ROW = 3  # after which a visit ends: the device is not what it should be


@dataclass(frozen=True)
class Plan:
    """What a visit measures. seed, count: of the record. rows: of earlier visits, by index. left: what is measured now."""

    seed: int
    count: int
    rows: dict[int, dict[str, Any]]
    left: list[int]


def plan(
    made: dict[str, Any] | None,
    rows: list[dict[str, Any]],
    requested: int | None = None,
    count: int | None = None,
    regret: int = REGRET,
    missing: bool = False,
) -> Plan:
    """What a visit measures, where the record is `made` and `rows` are those of its rows that still hold.

    requested, count: the seed and the number of products asked for, or None. Raises ValueError for a seed that tables were
    fitted on, and for another one than that of a record that is not complete.
    """
    if requested in FITTING_SEEDS:
        raise ValueError(f"seed {requested} is one that tables are fitted on (benchmarks/fit.py): choose another one")
    if made is not None and rows:
        by_index = {row["index"]: row for row in rows}
        wanted = count or made["count"]
        left = [index for index in range(wanted) if not _whole(by_index.get(index), index < regret)]
        if left and requested not in (None, made["seed"]):
            raise ValueError(f"the record is of seed {made['seed']} and not complete: --missing continues that one")
        if left or missing:
            return Plan(made["seed"], wanted, by_index, left if missing else list(range(wanted)))
    seed = requested
    while seed is None or seed in FITTING_SEEDS:
        seed = secrets.randbelow(2**32)
    return Plan(seed, count or COUNT, {}, list(range(count or COUNT)))


def _whole(row: dict[str, Any] | None, with_regret: bool) -> bool:
    """Whether a row is there and has all that it should have."""
    return row is not None and "error" not in row and ("regret" in row or not with_regret)


def sources() -> list[Path]:
    """What a row depends on here: the kernels and the choice of a tile, and what is drawn."""
    folder = records.ROOT / "benchmarks"
    return [*gemm.sources(), folder / "drawn.py", folder / "models.py", folder / "models.toml"]


def _calls(device: Any, peer: peers.Peer, drawn: Drawn, sets: list[Set]) -> Sequence[Callable[[], Any]]:
    """A call a set. A float32 result is detkern's alone: peers compute the 16-bit product, which is what it is compared with."""
    if peer.name != "detkern":
        return peer.calls(device, drawn.product, [(one.a, one.b, one.peer_out) for one in sets])
    more = {"accumulate": True} if drawn.accumulate else {}
    return [peer.bind(drawn.product, one.a, one.b, one.out, **more) for one in sets]


def measure(
    device: Any, drawn: Drawn, pool: Pool, compared: Iterable[peers.Peer], facts: Any, with_regret: bool
) -> dict[str, Any]:
    """The row of a product. A peer that does not serve it, or not rightly, is named in the row's `refused`; a wrong result
    of detkern or cuBLAS makes the row an `error`, without times.

    facts: the device's `capability` and `multiprocessors`. with_regret: time the tiles of the tables too.
    """
    product, sets = drawn.product, pool.sets(drawn)
    row = _description(drawn, len(sets))
    captured: dict[str, timing.Captured] = {}
    refused: dict[str, str] = {}
    expected = None
    for peer in compared:
        needed = peer.name in ("detkern", "cublas")
        out = sets[0].out if peer.name == "detkern" else sets[0].peer_out
        try:
            with peer.setting(product):
                calls = _calls(device, peer, drawn, sets)
                if peer.name == "detkern" and drawn.accumulate:
                    out.zero_()
                else:
                    pool.spoil(out)
                calls[0]()
                got, unwritten = pool.ends(out)
                expected = got if expected is None else expected
                off = float((got - expected).norm() / expected.norm())
                if unwritten or not off <= gemm.LARGEST_ERROR:
                    wrong = f"{unwritten} elements not written, {off:.3g} from cuBLAS"
                    if needed:
                        return row | {"error": f"{peer.name}: {wrong}"}
                    refused[peer.name] = wrong
                    continue
                captured[peer.name] = timing.capture(device, calls)
        except Exception as error:
            if needed:
                raise
            refused[peer.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if refused:
        row["refused"] = refused
    turns, warm = (FEW_TURNS, FEW_WARM) if product.reference_us > LONG_US else (timing.TURNS, timing.WARM)
    row |= _figures(timing.interleave(device, captured, turns, warm))
    if with_regret:
        times, graphs = tile_times.measure(device, drawn, sets, facts.capability, facts.multiprocessors)
        found, best = tile_times.regret(device, times, graphs)
        row |= {
            "regret": round(found, 4),
            "best_tile": best,
            "tiles_timed": len(times.rough),
            "tiles": times.considered,
        }
    return row


def _description(drawn: Drawn, sets: int) -> dict[str, Any]:
    product, layer = drawn.product, drawn.product.layer
    return {
        "index": drawn.index, "part": drawn.part, "name": layer.name, "layer": drawn.kind, "op": product.op, "m": product.m,
        "n": layer.n, "k": layer.k, "type": product.dtype, "contract": product.contract,
        "output": "float32" if drawn.output_f32 else product.dtype, "accumulate": drawn.accumulate, "sets": sets,
    }  # fmt: skip


def _figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """From µs a call in each turn: medians, and the medians over the turns of detkern's time over each peer's."""
    figures: dict[str, Any] = {f"{name}_us": round(statistics.median(found), 3) for name, found in times.items()}
    for name, theirs in times.items():
        if name != "detkern":
            ratios = [mine / other for mine, other in zip(times["detkern"], theirs, strict=True)]
            figures["ratio" if name == "cublas" else f"{name}_ratio"] = round(statistics.median(ratios), 4)
    return figures | {"turns": len(times["detkern"])}


def _tile(drawn: Drawn, facts: Any) -> str:
    """The tile that detkern chooses."""
    from detkern.cu import geometry

    problem = problem_of_sizes(drawn.product, drawn.output_f32, drawn.accumulate)
    return str(geometry.choose(problem, facts.capability, facts.multiprocessors).tile)


def sweep(
    device: Any, todo: list[Drawn], compared: list[peers.Peer], facts: Any, regret: int,
    done: Callable[[dict[str, Any]], None], deadline: float,
) -> int:  # fmt: skip
    """Measure the products. Returns how many were left when the deadline (of time.monotonic) had passed.

    regret: of products with a smaller index the tiles are timed too. done: gets each row.
    """
    if not todo or time.monotonic() >= deadline:
        return len(todo)
    failed = 0
    with device.active():
        pool = Pool(todo, device.cache_bytes, device.name)
        for place, drawn in enumerate(todo):
            if time.monotonic() >= deadline:
                return len(todo) - place
            try:
                row = measure(device, drawn, pool, compared, facts, drawn.index < regret)
                row["tile"] = _tile(drawn, facts)
                failed = 0
            except Exception as error:
                failed += 1
                row = _description(drawn, 0) | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
                if failed == ERRORS_IN_A_ROW:
                    raise
            done(row | {"date": records.now()})
            _show(row)
    return 0


def _show(row: dict[str, Any]) -> None:
    what = f"{row['index']:5} {row['part']:8} M {row['m']:5} {row['name']}"
    if "error" in row:
        print(f"{what}  WRONG: {row['error']}", flush=True)
        return
    regret = f"  regret {row['regret']:.3f}" if "regret" in row else ""
    print(f"{what}  {row['ratio']:.3f}  {row['detkern_us']:.2f} µs  {row['tile']}{regret}", flush=True)


def run(arguments: argparse.Namespace, device: Any, facts: Any, more: dict[str, str]) -> int:
    """Measure what the arguments ask for, record it and report it. Returns the exit status.

    facts: `name`, `driver`, `capability` and `multiprocessors` of the device.
    """
    begin = time.monotonic()
    what = "gemm-drawn-again" if arguments.again else "gemm-drawn"
    folder: Path = arguments.output or records.RESULTS / records.slug(facts.name)
    places = (folder / f"{what}.json", records.RESULTS / records.slug(facts.name) / f"{what}.json")
    before = next((path for path in places if path.exists()), None)
    made, kept = None, []
    if before is not None:
        made = json.loads(before.read_text())
        kept = records.kept(before, gpu=facts.name, driver=facts.driver, sources=sources(), more=more)
    requested = None if arguments.drawn == "new" else int(arguments.drawn)
    try:
        wanted = plan(made, kept, requested, arguments.count, arguments.regret, arguments.missing)
    except ValueError as error:
        print(error)
        return 1
    print(f"seed {wanted.seed}, {wanted.count} products, {len(wanted.left)} to measure", flush=True)
    compared, absent = peers.here(arguments.peers)
    for name, reason in absent.items():
        print(f"without {name}: {reason}", flush=True)
    rows, unsaved = wanted.rows, 0

    def save() -> None:
        records.write(
            what, [rows[index] for index in sorted(rows)], gpu=facts.name, driver=facts.driver, sources=sources(),
            folder=folder, more=more, about={"seed": wanted.seed, "count": wanted.count, "regret": arguments.regret},
        )  # fmt: skip

    def done(row: dict[str, Any]) -> None:
        nonlocal unsaved
        rows[row["index"]] = row
        unsaved += 1
        if unsaved >= SAVE_EVERY:
            save()
            unsaved = 0

    todo = [draw(wanted.seed, index) for index in wanted.left]
    try:
        left = sweep(device, todo, compared, facts, arguments.regret, done, begin + arguments.seconds)
    finally:
        if rows:
            save()
    print(f"{time.monotonic() - begin:.0f} s; {left} products left" + (": --missing continues" if left else ""))
    if not rows:
        print("nothing was measured")
        return 1
    return drawn_report.report(folder / f"{what}.json")
