"""The row of a drawn product, and `python -m benchmarks.gemm --drawn [SEED]` (benchmarks/drawn_record.py keeps the
records).

detkern and its peers on one set of operands after the other, in CUDA graphs that are replayed in turn as for the layers
of shapes.toml; of the first products the tiles of the tables too, for the regret of the choice.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from detkern.measure import peers, timing
from detkern.measure.drawn import Drawn
from detkern.measure.pool import Pool, Set

from . import drawn_report, tile_times
from .drawn_record import Visit, description
from .forced import problem_of_sizes
from .gemm_record import LARGEST_ERROR

__all__ = ["measure", "run"]

LONG_US = 5000.0  # by the reference line: of products that take longer fewer turns are timed
FEW_TURNS, FEW_WARM = 3, 1
_ALWAYS = ("detkern", "cublas")  # are timed for every product


def _whole(row: dict[str, Any], regret: int, names: Iterable[str], compare: int | None) -> bool:
    """Whether a row has the times of the peers, or says why not, and the regret where it should."""
    if compare is not None and row["index"] >= compare:
        names = _ALWAYS
    known = all(f"{name}_us" in row or name in row.get("refused", {}) for name in names)
    return known and ("regret" in row or row["index"] >= regret)


def _calls(device: Any, peer: peers.Peer, drawn: Drawn, sets: list[Set]) -> Sequence[Callable[[], Any]]:
    """A call a set. A float32 result is detkern's alone: peers compute the 16-bit product, which is what it is compared
    with."""
    if peer.name != "detkern":
        return peer.calls(device, drawn.product, [(one.a, one.b, one.peer_out) for one in sets])
    more = {"accumulate": True} if drawn.accumulate else {}
    return [peer.bind(drawn.product, one.a, one.b, one.out, **more) for one in sets]


def measure(
    device: Any, drawn: Drawn, pool: Pool, compared: Iterable[peers.Peer], facts: Any, with_regret: bool
) -> dict[str, Any]:
    """The row of a product. A peer that does not serve it, or not rightly, is named in the row's `refused`; a wrong
    result of detkern or cuBLAS makes the row an `error`, without times.

    facts: the device's `capability` and `multiprocessors`. with_regret: time the tiles of the tables too.
    """
    product, sets = drawn.product, pool.sets(drawn)
    row = description(drawn) | {"sets": len(sets)}
    captured: dict[str, timing.Captured] = {}
    refused: dict[str, str] = {}
    expected = None
    for peer in compared:
        needed = peer.name in _ALWAYS
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
                if unwritten or not off <= LARGEST_ERROR:
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
    return row | {"tile": _tile(drawn, facts)}


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
    from detkern.cu import tile_choice

    problem = problem_of_sizes(drawn.product, drawn.output_f32, drawn.accumulate)
    return str(tile_choice.choose(problem, facts.capability, facts.multiprocessors).tile)


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
    compared, absent = peers.here(arguments.peers)
    for name, reason in absent.items():
        print(f"without {name}: {reason}", flush=True)
    compare = arguments.compare
    names = [peer.name for peer in compared]
    whole = functools.partial(_whole, regret=arguments.regret, names=names, compare=compare)
    always = [peer for peer in compared if peer.name in _ALWAYS]
    what = "gemm-drawn-again" if arguments.again else "gemm-drawn"
    try:
        visit = Visit(arguments, what, facts, more, {"regret": arguments.regret, "compare": compare}, whole)
    except ValueError as error:
        print(error)
        return 1

    def row(drawn: Drawn, pool: Pool) -> dict[str, Any]:
        present = compared if compare is None or drawn.index < compare else always
        return measure(device, drawn, pool, present, facts, drawn.index < arguments.regret)

    visit.run(device, row, _show, device.cache_bytes)
    if not visit.rows:
        print("nothing was measured")
        return 1
    return drawn_report.report(visit.path)
