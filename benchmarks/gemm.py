"""detkern's GEMM against its peers on the layers of shapes.toml: `python -m benchmarks.gemm`.

Needs a CUDA device, PyTorch and CuPy; `detkern build cuda` before it keeps the compiler out of it. For each row the
peers' calls are captured in CUDA graphs over sets of random operands that together pass twice the L2 cache, and the
graphs are replayed in turn (detkern/measure/timing.py). Every result is spoilt beforehand and looked at afterwards. A
row's `ratio` is the median over the turns of detkern's time over that of cuBLAS in the same turn; times are medians in
µs.

A run need not measure everything: --shapes, --m and --what choose rows, --seconds ends it in time, and the rows of an
earlier record of the same GPU, driver, packages and sources stay, each with its date; --missing measures what is left.
The record is <DIR or benchmarks/results/<gpu>>/gemm.json, with tables and plots beside it (benchmarks/gemm_report.py).
--check-bits compares bits instead of timing (benchmarks/gemm_bits.py) and writes gemm-bits.json. --drawn measures
products drawn from the layers of models.toml (benchmarks/drawn_run.py) and writes gemm-drawn.json, with --again
gemm-drawn-again.json, with --check-bits gemm-drawn-bits.json (benchmarks/drawn_bits.py).

Ends with status 1 unless every target is met over all of shapes.toml (with --check-bits: unless no bit differs; with
--drawn: over all that was drawn).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from detkern.measure import peers, records, shapes, timing
from detkern.measure.operands import Operands
from detkern.measure.shapes import Product

from . import gemm_report
from .gemm_record import LARGEST_ERROR, key, merged, sources

WHAT = (*shapes.OPS, "tree")
OTHER_PEERS = tuple(name for name in peers.NAMES if name not in ("detkern", "cublas"))
# Those that time many algorithms for each product, or compile for it, only where they are asked for.
DEFAULT_PEERS = tuple(name for name in OTHER_PEERS if name not in ("cublaslt", "vllm_triton"))

# How far a peer's result may be from cuBLAS's, as a norm over its first rows: whether it computed the same product at
# all. The rounded nodes of a tree are what needs most of it.
COMPARED_ROWS = 256


def measure(device: Any, product: Product, operands: Operands, compared: Iterable[peers.Peer]) -> dict[str, Any]:
    """The row of a product. A peer that does not serve it, or not rightly, is named in the row's `refused`; a wrong
    result of detkern or cuBLAS makes the row an `error`, without times."""
    import torch

    rotating = [operands.rotating(product, name) for name in (*product.operands, "out")]
    captured: dict[str, timing.Captured] = {}
    refused: dict[str, str] = {}
    expected = None
    for peer in compared:
        try:
            with peer.setting(product):
                calls = peer.calls(device, product, list(zip(*rotating, strict=True)))
                found = timing.capture(device, calls)
        except Exception as error:
            if peer.name in ("detkern", "cublas"):
                raise
            refused[peer.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        operands.poison(product)
        found.graph.replay()
        unwritten = operands.unwritten(product)
        got = rotating[2][0][:COMPARED_ROWS].to(torch.float32, copy=True)
        if expected is None:
            expected = got
        off = float((got - expected).norm() / expected.norm())
        if not unwritten and off <= LARGEST_ERROR:
            captured[peer.name] = found
        else:
            wrong = f"{unwritten} elements not written, {off:.3g} from cuBLAS"
            if peer.name in ("detkern", "cublas"):
                return _description(product) | {"error": f"{peer.name}: {wrong}"}
            refused[peer.name] = wrong
    row = _description(product)
    if refused:
        row["refused"] = refused
    times = timing.interleave(device, captured)
    return row | _figures(product, times) | _chosen(product, *(matrices[0] for matrices in rotating))


def _description(product: Product) -> dict[str, Any]:
    layer = product.layer
    return {
        "name": layer.name, "model": layer.model, "layer": layer.layer, "op": product.op, "m": product.m, "n": layer.n,
        "k": layer.k, "type": product.dtype, "contract": product.contract,
    }  # fmt: skip


def _figures(product: Product, times: dict[str, list[float]]) -> dict[str, Any]:
    """From µs a call in each turn."""
    ratios = [ours / theirs for ours, theirs in zip(times["detkern"], times["cublas"], strict=True)]
    us = {name: statistics.median(found) for name, found in times.items()}
    return {
        **{f"{name}_us": round(found, 3) for name, found in us.items()},
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        "turns": len(ratios),
        "reference_us": float(f"{product.reference_us:.5g}"),
        "tflops": round(product.flops / us["detkern"] / 1e6, 2),
        "gb_per_s": round(product.bytes / us["detkern"] / 1e3, 1),
    }


def _chosen(product: Product, a: Any, b: Any, out: Any) -> dict[str, str]:
    """The kernel and tile that detkern ran."""
    import detkern

    found = detkern.explain(
        a, b, trans_a=product.trans_a, trans_b=product.trans_b, out=out, contract=product.contract
    )  # fmt: skip
    return {"kernel": found.kernel, "tile": found.tile, "geometry": found.geometry}


def sweep(
    device: Any,
    wanted: Iterable[list[Product]],
    compared: list[peers.Peer],
    done: Callable[[list[dict[str, Any]]], None],
    deadline: float,
) -> int:
    """Measure the products of one layer after the other. Returns how many were left when the deadline (of
    time.monotonic) had passed.

    done: gets the rows of each layer as they are there.
    """
    left = 0
    for products in wanted:
        if not products or time.monotonic() >= deadline:
            left += len(products)
            continue
        counts = {product: timing.sets(product.bytes, device.cache_bytes) for product in products}
        rows = []
        with device.active():
            operands = Operands(products, counts, device.name)
            for product in products:
                if time.monotonic() >= deadline:
                    left += 1
                    continue
                rows.append(measure(device, product, operands, compared) | {"date": records.now()})
                _show(rows[-1])
        del operands
        done(rows)
    return left


def _show(row: dict[str, Any]) -> None:
    what = f"{row['name']:22} {row['op']:7} M {row['m']:5} {row['contract']}"
    if "error" in row:
        print(f"{what}  WRONG: {row['error']}", flush=True)
        return
    times = "  ".join(f"{name.removesuffix('_us')} {row[name]:.2f}" for name in row if name.endswith("_us"))
    print(f"{what}  ratio {row['ratio']:.3f}  {times}  {row['tile']}", flush=True)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sizes(text: str) -> list[int]:
    return [int(part) for part in _list(text)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time detkern's GEMM against its peers on the shapes of shapes.toml.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--shapes", type=_list, default=["*"], help="names or patterns, as llama3-8b.*,odd.*")
    parser.add_argument("--m", type=_sizes, help="only these M of the shapes file, as 1,8,4096")
    parser.add_argument("--what", type=_list, default=list(WHAT), help=f"of {','.join(WHAT)} (default: all)")
    parser.add_argument("--contract", default="mma16", help="of the forward product and the gradients (default mma16)")
    parser.add_argument("--type", default="bfloat16", choices=("bfloat16", "float16"), help="default bfloat16")
    parser.add_argument(
        "--peers",
        type=_list,
        help=f"beside cublas: of {','.join(OTHER_PEERS)} (default: of {','.join(DEFAULT_PEERS)} those that are "
        f"installed; "
        "with --drawn none)",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many seconds")
    parser.add_argument("--missing", action="store_true", help="only rows that the record does not have yet")
    parser.add_argument("--check-bits", action="store_true", help="compare bits with the general kernels instead")
    parser.add_argument(
        "--drawn", nargs="?", const="new", metavar="SEED",
        help="measure products drawn by this seed; without one by that of a record that is not complete, else by a new "
        "one",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="with --drawn: the second record, gemm-drawn-again.json")
    parser.add_argument("--count", type=int, help="with --drawn: how many products (default 4000)")
    parser.add_argument(
        "--regret", type=int, default=200, metavar="N", help="with --drawn: time the tiles of the first N (default 200)"
    )
    parser.add_argument(
        "--compare",
        type=int,
        metavar="N",
        help="with --drawn: only the first N with peers beside cublas (default: all)",
    )
    arguments = parser.parse_args()
    if arguments.drawn is None and (arguments.again or arguments.count or arguments.compare is not None):
        parser.error("--again, --count and --compare are for --drawn")
    if arguments.drawn not in (None, "new") and not arguments.drawn.isdecimal():
        parser.error(f"--drawn: {arguments.drawn!r} is no seed, which is a whole number")
    of_the_grid = [f"--{name}" for name in ("shapes", "m", "what", "contract", "type")
                   if getattr(arguments, name) != parser.get_default(name)]  # fmt: skip
    if arguments.drawn and of_the_grid:
        parser.error(f"--drawn draws its own shapes: {', '.join(of_the_grid)} is for those of shapes.toml")
    if arguments.peers is None:
        arguments.peers = [] if arguments.drawn else list(DEFAULT_PEERS)
    for option, allowed in (("what", WHAT), ("peers", OTHER_PEERS)):
        if unknown := [name for name in getattr(arguments, option) if name not in allowed]:
            parser.error(f"--{option}: {', '.join(unknown)} is none of {', '.join(allowed)}")
    try:
        arguments.layers = shapes.load().named(arguments.shapes)
    except ValueError as error:
        parser.error(str(error))
    if arguments.m and (unknown_m := set(arguments.m) - set(shapes.load().m)):
        parser.error(f"--m: {sorted(unknown_m)} is not in the shapes file")
    return arguments


def run(arguments: argparse.Namespace, device: Any, gpu: str, driver: str, more: dict[str, str]) -> int:
    """Measure what the arguments ask for, record it and report it. Returns the exit status."""
    begin = time.monotonic()
    all_shapes = shapes.load()
    folder: Path = arguments.output or records.RESULTS / records.slug(gpu)
    before = next(
        (path for path in (folder / "gemm.json", records.RESULTS / records.slug(gpu) / "gemm.json") if path.exists()),
        None,
    )
    rows = [] if before is None else records.kept(before, gpu=gpu, driver=driver, sources=sources(), more=more)
    print(f"{len(rows)} rows kept" + (f" of {before}" if before else ""), flush=True)
    present = {key(row) for row in rows if "error" not in row} if arguments.missing else set()
    wanted = [
        [
            product
            for product in shapes.products(
                layer, all_shapes, arguments.what, contract=arguments.contract, dtype=arguments.type, m=arguments.m
            )
            if product.key not in present
        ]
        for layer in arguments.layers
    ]
    compared, absent = peers.here(arguments.peers)
    for name, reason in absent.items():
        print(f"without {name}: {reason}", flush=True)

    def done(new: list[dict[str, Any]]) -> None:
        nonlocal rows
        rows = merged(rows, new, all_shapes.layers)
        records.write("gemm", rows, gpu=gpu, driver=driver, sources=sources(), folder=folder, more=more)

    left = sweep(device, wanted, compared, done, begin + arguments.seconds)
    print(f"{time.monotonic() - begin:.0f} s" + (f"; {left} rows left: out of time" if left else ""), flush=True)
    if not (folder / "gemm.json").exists():
        print("nothing was measured")
        return 1
    return gemm_report.report(folder / "gemm.json")


def main() -> int:
    """Measure or compare, record, report."""
    arguments = _arguments()
    timing.leave_if(timing.missing())

    import torch

    from detkern.cu.device import describe

    facts = describe(0)
    more = {"cuda of torch": str(torch.version.cuda)}
    if arguments.drawn:
        from . import drawn_bits, drawn_run

        visit = drawn_bits.run if arguments.check_bits else drawn_run.run
        return visit(arguments, timing.Cuda(), facts, more)
    if arguments.check_bits:
        from . import gemm_bits

        return gemm_bits.run(arguments, facts.name, facts.driver, more)
    return run(arguments, timing.Cuda(), facts.name, facts.driver, more)


if __name__ == "__main__":
    sys.exit(main())
