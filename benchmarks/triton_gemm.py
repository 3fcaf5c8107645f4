"""The Triton backend against cuBLAS on this GPU: `python -m benchmarks.triton_gemm [--output DIR] [--tiles]`.

The five standard projections x[M, K] @ w at M = 4096, bf16, `mma16`, the weight as [N, K] (a linear layer's) and as [K,
N]; `fma`, `tree` and `tree-mma16` at one size. Triton, cuBLAS and the CUDA backend take turns inside CUDA graphs, over
sets of random operands that together pass twice the L2 cache; times are medians in µs. The bits of Triton and of the
CUDA backend are compared too. `--tiles` also times other tiles, which is how the pinned ones were chosen. Writes <DIR
or benchmarks/results/<gpu>>/triton-gemm.json and ends with status 1 where a target is missed or a bit differs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detkern.measure import records, timing

M = 4096
PROJECTIONS = ((4096, 12288), (4096, 4096), (4096, 14336), (14336, 4096), (4096, 32000))  # K, N
TARGET = 1.5  # of cuBLAS's time
OTHERS = (("fma", "float32"), ("fma", "bfloat16"), ("tree", "bfloat16"), ("tree-mma16", "bfloat16"))
SIDE = 4096  # M, N and K of the others

# (block m, block n, block k, warps, stages, band) that --tiles times.
TILES = (
    (128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 4, 8), (128, 256, 64, 8, 3, 4), (128, 256, 64, 8, 3, 16),
    (256, 128, 64, 8, 3, 8), (256, 128, 64, 8, 4, 4), (128, 128, 64, 4, 4, 8), (128, 128, 64, 8, 4, 8),
    (128, 256, 32, 8, 5, 8), (128, 128, 128, 8, 3, 8),
)  # fmt: skip

Call = Callable[[], Any]


def sources() -> list[Path]:
    """What the Triton backend's kernels are made of."""
    folder = records.ROOT / "detkern" / "triton"
    return sorted([*folder.glob("*.py"), *folder.glob("kernels/*.py")])


def _operands(m: int, n: int, k: int, dtype: Any, rows: bool) -> list[tuple[Any, Any, Any]]:
    """Sets of x [m, k], w [k, n] and out [m, n]; w is the transpose of [n, k] in memory unless `rows`."""
    import torch

    count = timing.sets((m * k + n * k + m * n) * dtype.itemsize, timing.Cuda().cache_bytes)
    generator = torch.Generator("cuda").manual_seed(m + n + k)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    return [
        (random(m, k), random(k, n) if rows else random(n, k).t(), torch.empty(m, n, dtype=dtype, device="cuda"))
        for _ in range(count)
    ]


def _row(m: int, n: int, k: int, contract: str, dtype: str, rows: bool, target: float | None) -> dict[str, Any]:
    import torch

    import detkern

    sets = _operands(m, n, k, getattr(torch, dtype), rows)
    patterns = torch.int32 if dtype == "float32" else torch.int16
    results = []
    for backend in ("cuda", "triton"):
        x, w, out = sets[0]
        out.view(patterns).fill_(-1)
        detkern.gemm(x, w, out=out, contract=contract, backend=backend)
        results.append(out.view(patterns).clone())
    differing = int((results[0] != results[1]).sum())
    peers: dict[str, list[Call]] = {
        "cublas": [functools.partial(torch.matmul, x, w, out=out) for x, w, out in sets],
    }
    for name, backend in (("triton", "triton"), ("detkern", "cuda")):
        peers[name] = [
            functools.partial(detkern.gemm, x, w, out=out, contract=contract, backend=backend) for x, w, out in sets
        ]
    device = timing.Cuda()
    with device.active():
        found = timing.medians(device, peers)
    plan = detkern.explain(*sets[0][:2], contract=contract, backend="triton")
    row: dict[str, Any] = {
        "m": m,
        "n": n,
        "k": k,
        "type": dtype,
        "contract": contract,
        "weight": "KN" if rows else "NK",
    }
    row |= {f"{name}_us": round(found[name], 2) for name in peers}
    ratio = found["triton"] / found["cublas"]
    row |= {"ratio": round(ratio, 3), "elements": m * n, "differing_from_cuda": differing, "tile": plan.tile}
    if target is not None:
        row |= {"target": target, "met": ratio <= target}
    print(records.shown(row), flush=True)
    return row


def _tile_call(tile: Any, x: Any, w: Any, out: Any) -> Call:
    """x @ w by a tile, on PyTorch's current stream."""
    import torch

    from detkern.dispatch.backend import Execution
    from detkern.operations.gemm.problem import gemm_problem
    from detkern.tensors import Device, TensorView
    from detkern.triton import geometry, launch
    from detkern.triton.device import describe
    from detkern.vocabulary.contracts import MMA16
    from detkern.vocabulary.dtypes import BF16

    device = Device("cuda", 0)
    views = [TensorView(t.data_ptr(), tuple(t.shape), t.stride(), BF16, device) for t in (x, w, out)]
    problem = gemm_problem(MMA16, *views, None, False)
    chosen = geometry.choose(problem, describe(device).multiprocessors, tile)

    launches = launch.Launches(problem, chosen)
    a, b, result = views

    def call() -> None:
        execution = Execution(device, torch.cuda.current_stream().cuda_stream, lambda size: a)
        launches(problem.m, (a, b, None), result, execution)

    return call


def tile_rows() -> list[dict[str, Any]]:
    """Every tile of TILES on two projections and both layouts of the weight."""
    import torch

    from detkern.triton.geometry import Tile

    rows = []
    for k, n in (PROJECTIONS[1], PROJECTIONS[2]):
        for by_rows in (False, True):
            sets = _operands(M, n, k, torch.bfloat16, by_rows)
            peers: dict[str, list[Call]] = {}
            for numbers in TILES:
                calls = [_tile_call(Tile(*numbers), *one) for one in sets]
                try:
                    calls[0]()
                except Exception as error:  # noqa: BLE001  a tile that does not compile here is one line, not the end
                    print(f"{numbers}: {type(error).__name__}: {str(error)[:120]}", flush=True)
                    continue
                peers["/".join(map(str, numbers))] = calls
            peers["cublas"] = [functools.partial(torch.matmul, x, w, out=out) for x, w, out in sets]
            device = timing.Cuda()
            with device.active():
                found = timing.medians(device, peers)
            for name, us in found.items():
                row = {"tile": name, "n": n, "k": k, "weight": "KN" if by_rows else "NK", "us": round(us, 1)}
                rows.append(row | {"ratio": round(us / found["cublas"], 3)})
                print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def _no_triton() -> str | None:
    """Why the Triton backend cannot run on the device, or None."""
    from detkern.dispatch import registry
    from detkern.tensors import Device

    return registry.load("triton").unavailable(Device("cuda", 0))


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed or a bit differs."""
    parser = argparse.ArgumentParser(description="Time the Triton backend against cuBLAS.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--tiles", action="store_true", help="also time other tiles")
    arguments = parser.parse_args()

    timing.leave_if(timing.missing() or _no_triton())
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    rows = [
        _row(M, n, k, "mma16", "bfloat16", by_rows, TARGET) for k, n in PROJECTIONS for by_rows in (False, True)
    ]  # fmt: skip
    rows += [_row(SIDE, SIDE, SIDE, contract, dtype, False, None) for contract, dtype in OTHERS]
    rows += tile_rows() if arguments.tiles else []
    records.write_here("triton-gemm", rows, [*sources(), *records.product_sources()], arguments.output)
    return int(any(not row.get("met", True) or row.get("differing_from_cuda") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
