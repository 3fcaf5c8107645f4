"""The row operations against PyTorch's on this GPU: `python -m benchmarks.rows [--output DIR] [--operations NAME,…]`.

Needs a CUDA device, PyTorch and CuPy. Each row's calls run inside CUDA graphs, over sets of random operands that
together pass twice the L2 cache, detkern and PyTorch in turn; times are medians over the turns, in µs a call. Both
write into given outputs. PyTorch's `mean_square` is two kernels, square and mean; the gradients of sums are its
broadcasting kernels. `bytes_us` is what reading every operand and writing every result once takes at the device's
bandwidth, measured here by a copy. Writes <DIR or benchmarks/results/<gpu>>/rows.json and ends with status 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detkern.measure import records, timing

SHAPES = ((4096, 4096), (32, 151_936))
TYPES = ("float32", "bfloat16")
# The most of PyTorch's time.
TARGETS = {"softmax": 1.5, "mean": 1.5}

REDUCING = ("sum", "mean", "mean_square")
OPERATIONS = (*REDUCING, "softmax", "log_softmax")
NAMES = (*OPERATIONS, *(f"{name}_backward" for name in OPERATIONS))

Call = Callable[[], Any]


def calls(name: str, m: int, n: int, dtype: Any, seed: int) -> tuple[Call, Call, int]:
    """(detkern's call, PyTorch's, bytes read and written) on operands of their own."""
    import torch

    from detkern import rows

    aten = torch.ops.aten
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    def empty(*shape: int) -> Any:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    x, operation = random(m, n), getattr(rows, name)
    forward = name.removesuffix("_backward")
    if name in REDUCING:
        out, theirs, square = empty(m), empty(m), empty(m, n) if name == "mean_square" else None

        def reduce() -> None:
            if square is None:
                getattr(torch, name)(x, dim=-1, out=theirs)
            else:
                torch.mean(torch.square(x, out=square), dim=-1, out=theirs)

        return functools.partial(operation, x, out=out), reduce, m * n * dtype.itemsize
    out, theirs = empty(m, n), empty(m, n)
    if name == forward:
        peer = aten._softmax.out if name == "softmax" else aten._log_softmax.out
        return (
            functools.partial(operation, x, out=out),
            functools.partial(peer, x, -1, False, out=theirs),
            2 * m * n * dtype.itemsize,
        )
    if forward in REDUCING:
        dy = random(m)
        wide = dy[:, None].expand(m, n)
        gradients: dict[str, Call] = {
            "sum": functools.partial(theirs.copy_, wide),
            "mean": functools.partial(torch.div, wide, n, out=theirs),
            "mean_square": lambda: torch.mul((dy * (2 / n))[:, None], x, out=theirs),
        }
        second = x if forward == "mean_square" else n
        count = 2 if forward == "mean_square" else 1
        return functools.partial(operation, dy, second, out=out), gradients[forward], count * m * n * dtype.itemsize
    y = getattr(torch, forward)(random(m, n), -1)
    if forward == "softmax":
        peer = functools.partial(aten._softmax_backward_data.out, x, y, -1, dtype, grad_input=theirs)
    else:
        peer = functools.partial(aten._log_softmax_backward_data.out, x, y, -1, dtype, out=theirs)
    return functools.partial(operation, x, y, out=out), peer, 3 * m * n * dtype.itemsize


def bandwidth(device: timing.Cuda) -> float:
    """Bytes a µs of a copy between arrays of 256 MB."""
    import torch

    arrays = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(4)]
    with device.active():
        found = timing.medians(
            device, {"copy": [functools.partial(arrays[i].copy_, arrays[(i + 1) % 4]) for i in range(4)]}
        )
    return 2 * (1 << 28) / found["copy"]


def measured(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each operation, shape and type."""
    import torch

    device = timing.Cuda()
    rate = bandwidth(device)
    found = []
    for m, n in SHAPES:
        for type_name in TYPES:
            dtype = getattr(torch, type_name)
            for name in names:
                count = timing.sets(m * n * dtype.itemsize, device.cache_bytes)
                made = [calls(name, m, n, dtype, seed) for seed in range(count)]
                with device.active():
                    times = timing.medians(
                        device, {"detkern": [one[0] for one in made], "torch": [one[1] for one in made]}
                    )
                ratio, target = times["detkern"] / times["torch"], TARGETS.get(name)
                row = {
                    "operation": name, "type": type_name, "m": m, "n": n, "detkern_us": round(times["detkern"], 2),
                    "torch_us": round(times["torch"], 2), "bytes_us": round(made[0][2] / rate, 2),
                    "ratio": round(ratio, 3), "target": target, "met": target is None or ratio <= target,
                }  # fmt: skip
                found.append(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                del made
    return found


def sources() -> list[Path]:
    """What the kernel is made of, and what chooses its tile."""
    from detkern.cu import loader, rows

    kernel = [loader.FOLDER / name for name, _ in loader.read_sources(rows.SOURCE)]
    return sorted([*kernel, Path(rows.__file__)])


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time the row operations against PyTorch's.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--operations", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    arguments = parser.parse_args()
    names = tuple(arguments.operations.split(","))
    if unknown := set(names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}")

    timing.leave_if(timing.missing())
    rows = measured(names)
    records.write_here("rows", rows, sources(), arguments.output)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
