"""Host time of a number of rows that was never seen: `python -m benchmarks.host_time [--output DIR]`.

A server's batches have another M at nearly every call, so what a call costs the first time is what it costs. µs that
the calling thread spends on each of 4,096 calls, every M from 1 to 4,096 once, in random order, without a
synchronisation between them: of detkern.linear on CuPy and PyTorch tensors, detkern.torch.linear without gradients and
PyTorch's own; then the same calls again in another order. Each path has a layer of its own, since plans are shared.
Kernels are small, so that the GPU never holds the host up. The collector of garbage is off, as in timeit. What is
loaded in the middle shows in `max_us` and `loads`.

Where this version of detkern has `preload`, it is called first, for these products. Needs a CUDA device, PyTorch and
CuPy: ends with status 2 and a sentence where they are missing, with 1 if a target is missed. Writes <DIR or
benchmarks/results/<gpu>>/host-time.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detkern.measure import records, timing

from .drawn_report import percentile

__all__ = ["COUNT", "P50_US", "P99_US", "main", "measure", "row", "sources"]

COUNT = 4096  # values of M
K, FIRST_N, STEP_N = 512, 1024, 64
P50_US, P99_US = 60.0, 150.0  # the most, of detkern's calls of an M that was never seen
LOAD_US = 5000.0  # what takes longer than this has loaded or compiled something
POOL_BYTES = 256 << 20  # asked for and given back before: results come from memory that is there
SEED = 21

Call = Callable[[Any], Any]


def spent(call: Call, arguments: Sequence[Any]) -> list[float]:
    """µs of each call, one after the other."""
    times = [0] * len(arguments)
    gc.collect()
    gc.disable()
    try:
        clock = time.perf_counter_ns
        for place, argument in enumerate(arguments):
            begin = clock()
            call(argument)
            times[place] = clock() - begin
    finally:
        gc.enable()
    return [one / 1000 for one in times]


def row(path: str, which: str, times: Sequence[float], judged: bool) -> dict[str, Any]:
    """A row of the record. which: "never seen" or "again". judged: whether the targets are for it."""
    ordered = sorted(times)
    p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
    found = {
        "host": path, "m": which, "calls": len(ordered), "k": K, "type": "float16", "p50_us": round(p50, 2),
        "p90_us": round(percentile(ordered, 0.9), 2), "p99_us": round(p99, 2), "max_us": round(ordered[-1], 1),
        "loads": sum(one > LOAD_US for one in ordered),
    }  # fmt: skip
    if judged:
        found |= {"target_p50_us": P50_US, "target_p99_us": P99_US, "met": p50 <= P50_US and p99 <= P99_US}
    return found


def measure(
    path: str, call: Call, inputs: Sequence[Any], judged: bool, finish: Callable[[], Any]
) -> list[dict[str, Any]]:
    """The rows of a path: its inputs in random order, then again in another.

    inputs: one for each M. judged: whether the targets are for it. finish: waits for the device; it is called before
    and after, never between.
    """
    rows = []
    for which, seed in (("never seen", SEED), ("again", SEED + 1)):
        order = random.Random(seed).sample(range(len(inputs)), len(inputs))
        finish()
        times = spent(call, [inputs[place] for place in order])
        finish()
        rows.append(row(path, which, times, judged and which == "never seen"))
    return rows


def _paths() -> list[tuple[str, Call, list[Any], bool]]:
    """(name, call, inputs, whether it is detkern's), each with weights [N, K] of an N of its own."""
    import cupy
    import torch

    import detkern
    import detkern.torch as dt

    generator = torch.Generator("cuda").manual_seed(SEED)

    def random_tensor(rows: int) -> Any:
        return torch.randn(rows, K, generator=generator, device="cuda").to(
            torch.float16
        )  # CuPy has no bfloat16 everywhere

    x = random_tensor(COUNT)
    inputs = [x[:m] for m in range(1, COUNT + 1)]
    weights = [random_tensor(FIRST_N + STEP_N * place) for place in range(4)]
    x_cupy = cupy.from_dlpack(x)
    inputs_cupy = [x_cupy[:m] for m in range(1, COUNT + 1)]
    weight_cupy = cupy.from_dlpack(weights[0])
    for allocate in (cupy.cuda.alloc, functools.partial(torch.empty, dtype=torch.uint8, device="cuda")):
        allocate(POOL_BYTES)
    return [
        ("detkern.linear, CuPy", lambda one: detkern.linear(one, weight_cupy), inputs_cupy, True),
        ("detkern.linear, PyTorch", lambda one: detkern.linear(one, weights[1]), inputs, True),
        ("detkern.torch.linear, no grad", lambda one: dt.linear(one, weights[2]), inputs, True),
        ("torch.nn.functional.linear", lambda one: torch.nn.functional.linear(one, weights[3]), inputs, False),
    ]


def sources() -> list[Path]:
    """What host time depends on."""
    package = records.ROOT / "detkern"
    return sorted(
        [*package.glob("*.py"), *package.glob("torch/**/*.py"), *package.glob("tensors/*.py"),
            *package.glob("dispatch/*.py"),
         *package.glob("operations/**/*.py"), *package.glob("cu/*.py")]
    )  # fmt: skip


def main() -> int:
    """Measure, print, record. Status 2 without a device, 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time detkern's host side for numbers of rows that were never seen.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    arguments = parser.parse_args()
    timing.leave_if(timing.missing())

    import torch

    import detkern

    begin = time.perf_counter()
    if (preload := getattr(detkern, "preload", None)) is not None:
        preload(dtypes="float16", layouts="nt")
        print(f"preload took {time.perf_counter() - begin:.1f} s")
    rows = []
    with torch.no_grad():
        for path, call, inputs, judged in _paths():
            for found in measure(path, call, inputs, judged, torch.cuda.synchronize):
                rows.append(found)
                print(records.shown(found), flush=True)
    records.write_here("host-time", rows, sources(), arguments.output)
    return int(not all(one.get("met", True) for one in rows))


if __name__ == "__main__":
    sys.exit(main())
