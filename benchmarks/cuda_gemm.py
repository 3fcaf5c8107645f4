"""The CUDA backend against cuBLAS on this GPU: `python -m benchmarks.cuda_gemm [--output DIR] [--tiles]`.

Needs a CUDA device, PyTorch and CuPy. Each row's products run inside CUDA graphs, over sets of random operands that
together pass twice the L2 cache, detkern and its peer in turn; times are medians over the turns, in µs a product of
x[M, K] @ w[N, K].T. Host times are of the calls alone. `--tiles` also times every tile, in the two numbers that the
tile tables hold. Writes <DIR or benchmarks/results/<gpu>>/cuda-gemm.json and ends with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detkern.measure import records, timing
from detkern.measure.shapes import Layer, Product
from detkern.measure.timing import TURNS, WARM

from .forced import forced_call

# (contract, operand type, peer's type, the most of the peer's time, shapes m, n, k)
SQUARE, DEEP = (4096, 4096, 4096), (4096, 4096, 14336)
TARGETS: list[tuple[str, str, str, float, tuple[tuple[int, int, int], ...]]] = [
    ("fma", "float32", "float32", 1.15, (SQUARE,)),
    ("fma", "bfloat16", "float32", 1.15, (SQUARE,)),
    ("fma", "float16", "float32", 1.15, (SQUARE,)),
    ("tree", "bfloat16", "float32", 1.25, (SQUARE,)),
    ("tree", "float16", "float32", 1.25, (SQUARE,)),
    ("mma16", "bfloat16", "bfloat16", 2.0, (SQUARE, DEEP)),
    ("mma16", "float16", "float16", 2.0, (SQUARE, DEEP)),
    ("tree-mma16", "bfloat16", "bfloat16", 2.0, (SQUARE, DEEP)),
    ("tree-mma16", "float16", "float16", 2.0, (SQUARE, DEEP)),
]


def _operands(m: int, n: int, k: int, dtype: Any, count: int) -> list[tuple[Any, Any, Any]]:
    """Sets of x [m, k], w [n, k] and an output [m, n]."""
    import torch

    generator = torch.Generator("cuda").manual_seed(m + n + k)

    def random(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator, device="cuda").to(dtype)

    return [(random(m, k), random(n, k), torch.empty(m, n, dtype=dtype, device="cuda")) for _ in range(count)]


def _sets(m: int, n: int, k: int, itemsize: int) -> int:
    return timing.sets((m * k + n * k + m * n) * itemsize, _device().cache_bytes)


@functools.cache
def _device() -> timing.Cuda:
    return timing.Cuda()


def _medians(peers: dict[str, list[Callable[[], Any]]]) -> dict[str, float]:
    with _device().active():
        return timing.medians(_device(), peers)


def speed_rows() -> list[dict[str, Any]]:
    """A row for each target."""
    import torch

    import detkern

    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for contract, dtype, peer_dtype, limit, shapes in TARGETS:
        for m, n, k in shapes:
            kind, peer_kind = getattr(torch, dtype), getattr(torch, peer_dtype)
            ours = _operands(m, n, k, kind, _sets(m, n, k, kind.itemsize))
            theirs = ours if kind == peer_kind else _operands(m, n, k, peer_kind, _sets(m, n, k, peer_kind.itemsize))
            found = _medians(
                {
                    "detkern": [
                        functools.partial(detkern.gemm, x, w, trans_b=True, out=out, contract=contract)
                        for x, w, out in ours
                    ],
                    "cublas": [functools.partial(torch.matmul, x, w.t(), out=out) for x, w, out in theirs],
                }
            )
            explanation = detkern.explain(ours[0][0], ours[0][1], trans_b=True, contract=contract)
            ratio = found["detkern"] / found["cublas"]
            rows.append(
                {
                    "contract": contract,
                    "type": dtype,
                    "m": m,
                    "n": n,
                    "k": k,
                    "detkern_us": round(found["detkern"], 2),
                    "cublas_us": round(found["cublas"], 2),
                    "cublas_type": peer_dtype,
                    "ratio": round(ratio, 3),
                    "target": limit,
                    "met": ratio <= limit,
                    "tile": explanation.tile,
                }
            )
            _show(rows[-1])
            del ours, theirs
            torch.cuda.empty_cache()
    return rows


def cublas_bits_rows() -> list[dict[str, Any]]:
    """The default contract against cuBLAS where cuBLAS does not split K."""
    import torch

    import detkern

    rows = []
    for dtype in ("bfloat16", "float16"):
        for m, n, k in ((256, 4096, 4096), (4096, 4096, 4096)):
            ((x, w, out),) = _operands(m, n, k, getattr(torch, dtype), 1)
            detkern.gemm(x, w, trans_b=True, out=out)
            differing = int((out.view(torch.int16) != torch.matmul(x, w.t()).view(torch.int16)).sum())
            rows.append(
                {
                    "contract": "mma16", "type": dtype, "m": m, "n": n, "k": k, "elements": m * n,
                    "differing_from_cublas": differing,
                }
            )  # fmt: skip
            _show(rows[-1])
    return rows


def host_rows() -> list[dict[str, Any]]:
    """µs that the calling thread spends on a small product: the median over rounds of 200 calls."""
    import cupy
    import torch

    import detkern

    x = torch.randn(64, 64, device="cuda").bfloat16()
    out = torch.empty_like(x)
    half = cupy.ones((64, 64), cupy.float16)
    half_out = cupy.empty_like(half)
    calls: dict[str, Callable[[], Any]] = {
        "detkern.gemm of torch tensors": lambda: detkern.gemm(x, x),
        "detkern.gemm of torch tensors, out=": lambda: detkern.gemm(x, x, out=out),
        "detkern.gemm of cupy arrays": lambda: detkern.gemm(half, half),
        "torch.nn.functional.linear": lambda: torch.nn.functional.linear(x, x),
        "torch.matmul, out=": lambda: torch.matmul(x, x, out=out),
        "cupy.matmul": lambda: cupy.matmul(half, half),
        "cupy.matmul, out=": lambda: cupy.matmul(half, half, out=half_out),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM + TURNS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            if turn >= WARM:
                times[name].append(1e6 * (time.perf_counter() - start) / 200)
    rows = [{"host": name, "host_us": round(statistics.median(found), 2)} for name, found in times.items()]
    for row in rows:
        _show(row)
    return rows


def tile_rows() -> list[dict[str, Any]]:
    """`wave_us` and `alone_us` of every tile, as the tables define them: 4096 k with CTAS_PER_SM CTAs on each
    multiprocessor, and with one. Both operands K_MAJOR."""
    import torch

    from detkern.cu import gemm_tile
    from detkern.cu.device import describe
    from detkern.vocabulary.contracts import get_contract
    from detkern.vocabulary.dtypes import by_name

    multiprocessors = describe(0).multiprocessors
    rows = []
    k = 4096

    def calls(contract: str, dtype: Any, tile: Any, ctas: int) -> list[Callable[[], Any]]:
        """Calls whose tiles are `ctas` on each multiprocessor."""
        count = multiprocessors * ctas
        across = max(divisor for divisor in range(1, math.isqrt(count) + 1) if count % divisor == 0)
        m, n = tile["TILE_M"] * across, tile["TILE_N"] * (count // across)
        product = Product(Layer("tiles", str(tile), n, k), m, "forward", contract, dtype.name)
        operands = _operands(m, n, k, getattr(torch, dtype.name), _sets(m, n, k, dtype.itemsize))
        return [forced_call(product, tile, *one) for one in operands]

    for contract_name, dtype_name in (
        ("fma", "float32"),
        ("fma", "bfloat16"),
        ("tree", "bfloat16"),
        ("mma16", "bfloat16"),
        ("tree-mma16", "bfloat16"),
    ):
        contract, dtype = get_contract(contract_name), by_name(dtype_name)
        assert dtype is not None
        for tile in gemm_tile.tiles_for(contract, dtype):
            # Tiles of mma_wgmma.json have neither: benchmarks/fit.py is for them.
            if (gemm_tile.Load.K_MAJOR, gemm_tile.Load.K_MAJOR) not in tile.loads or not tile.wave_us:
                continue
            sides = {"wave_us": calls(contract_name, dtype, tile, tile["CTAS_PER_SM"])}
            if tile["CTAS_PER_SM"] > 1:
                sides["alone_us"] = calls(contract_name, dtype, tile, 1)
            found = {name: round(microseconds, 1) for name, microseconds in _medians(sides).items()}
            in_table = {"table_wave_us": tile.wave_us, "table_alone_us": tile.alone_us}
            rows.append({"contract": contract_name, "type": dtype_name, "tile": str(tile), **found, **in_table})
            _show(rows[-1])
            del sides
            torch.cuda.empty_cache()
    return rows


def _show(row: dict[str, Any]) -> None:
    print(records.shown(row), flush=True)


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time the CUDA backend against cuBLAS.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--tiles", action="store_true", help="also time every tile of the tables")
    arguments = parser.parse_args()

    timing.leave_if(timing.missing())
    rows = speed_rows() + cublas_bits_rows() + host_rows() + (tile_rows() if arguments.tiles else [])
    records.write_here("cuda-gemm", rows, records.product_sources(), arguments.output)
    return int(not all(row.get("met", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
