"""The gradient of an embedding's weight against PyTorch's on this GPU:
`python -m benchmarks.scatter_sum [--output DIR]`.

Needs a CUDA device, PyTorch and CuPy. Each row's calls run inside CUDA graphs, detkern and PyTorch in turn, over sets
of random operands that together pass twice the L2 cache; times are medians over the turns, in µs a call. `gradient`:
the whole weight's, `torch.ops.aten.embedding_dense_backward` beside it. `main_grad`: added to a float32 accumulator,
`index_add_` of the gradients as float32 beside it, whose bits PyTorch does not fix. Tokens are uniform, by Zipf's law
with exponent 1.2, one in half of all places, or one everywhere. Writes <DIR or
benchmarks/results/<gpu>>/scatter-sum.json and ends with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from detkern.measure import records, timing

# Vocabulary and width of Llama 3 8B, Qwen3 0.6B and Llama 2 7B, and tokens of a step.
SIZES = ((128_256, 4096, 4096), (128_256, 4096, 16_384), (151_936, 1024, 4096), (32_000, 4096, 8192))
TYPES = ("bfloat16", "float32")
DISTRIBUTIONS = ("uniform", "zipf", "half", "one")
TARGET = 1.1  # the most of PyTorch's time for the gradient

Call = Callable[[], Any]


def tokens(distribution: str, count: int, vocabulary: int, seed: int) -> np.ndarray[Any, Any]:
    """Whole numbers below `vocabulary`."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, vocabulary, count)
    if distribution == "zipf":
        return np.minimum(rng.zipf(1.2, count), vocabulary) - 1
    if distribution == "half":
        return np.where(rng.random(count) < 0.5, vocabulary // 2, drawn)
    return np.full(count, vocabulary // 2) if distribution == "one" else drawn


def calls(what: str, sizes: tuple[int, int, int], dtype: Any, distribution: str, seed: int) -> tuple[Call, Call]:
    """detkern's call and PyTorch's."""
    import torch

    import detkern

    vocabulary, width, count = sizes
    dy = torch.randn(count, width, device="cuda").to(dtype)
    index = torch.from_numpy(tokens(distribution, count, vocabulary, seed)).cuda()
    if what == "gradient":
        peer = torch.ops.aten.embedding_dense_backward
        return (
            functools.partial(detkern.scatter_sum, dy, index, vocabulary),
            functools.partial(peer, dy, index, vocabulary, -1, False),
        )
    ours, theirs = (torch.zeros(vocabulary, width, device="cuda") for _ in range(2))
    return (
        functools.partial(detkern.scatter_sum, dy, index, out=ours, accumulate=True),
        lambda: theirs.index_add_(0, index, dy.float()),
    )


def measured() -> list[dict[str, Any]]:
    """A row for each of the two, size, type and distribution."""
    import torch

    device, found = timing.Cuda(), []
    for what in ("gradient", "main_grad"):
        for sizes in SIZES:
            for type_name in TYPES if sizes[2] == 4096 else TYPES[:1]:
                for distribution in DISTRIBUTIONS:
                    dtype = getattr(torch, type_name)
                    made = [calls(what, sizes, dtype, distribution, seed) for seed in range(2)]
                    with device.active():
                        times = timing.medians(
                            device, {"detkern": [one[0] for one in made], "torch": [one[1] for one in made]}
                        )
                    ratio, target = times["detkern"] / times["torch"], TARGET if what == "gradient" else None
                    row = {
                        "what": what, "vocabulary": sizes[0], "width": sizes[1], "tokens": sizes[2], "type": type_name,
                        "distribution": distribution, "detkern_us": round(times["detkern"], 1),
                        "torch_us": round(times["torch"], 1), "ratio": round(ratio, 3), "target": target,
                        "met": target is None or ratio <= target,
                    }  # fmt: skip
                    found.append(row)
                    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                    del made
                    torch.cuda.empty_cache()
    return found


def sources() -> list[Path]:
    """What the kernels are made of, and what divides their work."""
    from detkern.cu import loader, scatter_sum

    files = {
        name for source in (scatter_sum.SORT_SOURCE, scatter_sum.SOURCE) for name, _ in loader.read_sources(source)
    }
    return sorted([*(loader.FOLDER / name for name in files), Path(scatter_sum.__file__)])


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time the gradient of an embedding against PyTorch's.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    arguments = parser.parse_args()
    timing.leave_if(timing.missing())
    rows = measured()
    records.write_here("scatter-sum", rows, sources(), arguments.output)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
