"""Log-probabilities straight from hidden states against what people use instead:
`python -m benchmarks.linear_logp [--drawn] [--again] [--seed N] [--count N] [--seconds N] [--output DIR]`.

`forward`: log-probabilities of one target a row. `entropy`: these and the entropy. `both`: forward and the gradients of
hidden and weight. Without --drawn it measures the sizes that have targets of their own, else heads of published models
(detkern/measure/drawn.py) at 1 to 16,384 rows, with a seed that nothing was fitted on. Peers of one run, where they can
be imported:

    torch      log_softmax of the float32 logits of torch.nn.functional.linear, and gather
    compiled   the same by torch.compile
    matmul     the product alone, into bfloat16 logits
    liger      LigerFusedLinearCrossEntropyFunction: forward alone computes its gradients too, so it is in `both` only
    quack      quack.linear_cross_entropy

Calls run inside CUDA graphs, the peers in turn; times are medians over the turns, in µs a call. `_mb` is the most
memory that a call takes beside its operands, its results included. `tflops` counts 2 N V D operations forward and
8 N V D for both, as detkern computes the logits twice. Writes <DIR or
benchmarks/results/<gpu>>/linear-logp.json (with --again linear-logp-again.json); status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from detkern.measure import drawn, records, timing

__all__ = ["Shape", "judge", "main", "measure", "sources", "summary"]

SEEDS = {False: 23, True: 24}  # of linear-logp and linear-logp-again
# Vocabulary, width and rows that have targets; the most µs where that is a number, else of the matmul's time.
LARGE = ((4096, 128_256, 4096), (8192, 151_936, 2048))
FEW = {(128_256, 4096): 259.0, (151_936, 2048): 156.0}
FEW_ROWS = (1, 8, 64)
BOTH_US = {LARGE[0]: 23_900.0, LARGE[1]: 28_300.0}
FORWARD_OF_MATMUL, ENTROPY_OF_MATMUL, FEW_OF_TORCH = 1.0, 1.02, 0.9
MEAN_OF_TORCH = {"forward": 0.75, "both": 0.90}  # of drawn shapes
WORST_OF_TORCH = {"forward": 1.0, "both": 1.20}

Shape = tuple[int, int, int]  # rows, vocabulary, width
Call = Callable[[], Any]


def _torch(hidden: Any, weight: Any, target: Any) -> Any:
    import torch

    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]


@functools.cache
def _compiled() -> Any:
    import torch

    return torch.compile(_torch, dynamic=False)


def _detkern(hidden: Any, weight: Any, target: Any, entropy: bool = False) -> Any:
    import detkern.torch

    return detkern.torch.linear_logp(hidden, weight, target, return_entropy=entropy)


def _liger(hidden: Any, weight: Any, target: Any) -> Any:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


def _quack(hidden: Any, weight: Any, target: Any) -> Any:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, target)


def peers(what: str, leave_out: Iterable[str] = ()) -> dict[str, Callable[[Any, Any, Any], Any]]:
    """What computes `what` here, by name: functions of hidden, weight and target."""
    import torch

    if what == "matmul":
        return {"matmul": lambda hidden, weight, target: torch.matmul(hidden, weight.t())}
    found: dict[str, Callable[[Any, Any, Any], Any]] = {
        "detkern": functools.partial(_detkern, entropy=what == "entropy")
    }
    if what != "entropy":
        found["torch"] = _torch
        found["compiled"] = lambda *operands: _compiled()(*operands)
        if what == "both" and importlib.util.find_spec("liger_kernel"):
            found["liger"] = _liger
        if importlib.util.find_spec("quack"):
            found["quack"] = _quack
    return {name: function for name, function in found.items() if name not in leave_out}


def operands(shape: Shape, seed: int, device: str = "cuda") -> tuple[Any, Any, Any]:
    """hidden, weight and target, bfloat16; logits have the standard deviation 4."""
    import torch

    rows, vocabulary, width = shape
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(rows, width, device=device, generator=generator).bfloat16()
    weight = torch.empty(vocabulary, width, device=device, dtype=torch.bfloat16)
    weight.normal_(0, 4 / math.sqrt(width), generator=generator)
    return hidden, weight, torch.randint(0, vocabulary, (rows,), device=device, generator=generator)


def bound(function: Callable[[Any, Any, Any], Any], given: tuple[Any, Any, Any], gradients: bool) -> Call:
    """The call of a peer, or of it and its gradients. What `function` gives may be a loss or one number a row."""
    import torch

    if not gradients:

        def forward() -> Any:
            with torch.no_grad():
                return function(*given)

        return forward
    hidden, weight = (x.detach().requires_grad_() for x in given[:2])

    def both() -> Any:
        result = function(hidden, weight, given[2])
        return torch.autograd.grad(result, (hidden, weight), torch.ones_like(result))

    return both


def peak_mb(call: Call) -> float:
    """The most memory that a call takes beside what is there already, in MiB."""
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    del result
    return most / 2**20


def measure(device: Any, shape: Shape, whats: Iterable[str], leave_out: Iterable[str] = ()) -> list[dict[str, Any]]:
    """A row for each of `whats`, with the time of every peer. The product alone is timed with the forward."""
    import torch

    made = [operands(shape, seed) for seed in range(2)]
    rows = []
    for what in whats:
        functions = peers(what, leave_out)
        if what in ("forward", "entropy"):
            functions |= peers("matmul")
        calls: dict[str, list[Call]] = {}
        row: dict[str, Any] = {"what": what, "rows": shape[0], "vocabulary": shape[1], "width": shape[2]}
        for name, function in functions.items():
            calls[name] = [bound(function, given, what == "both") for given in made]
            row[f"{name}_mb"] = round(peak_mb(calls[name][0]))
        with device.active():
            times = timing.medians(device, calls)
        operations = (8 if what == "both" else 2) * math.prod(shape)
        row |= {f"{name}_us": round(time_us, 1) for name, time_us in times.items()}
        row["tflops"] = round(operations / times["detkern"] / 1e6, 1)
        row |= {
            f"of_{name}": round(times["detkern"] / time_us, 3) for name, time_us in times.items() if name != "detkern"
        }
        rows.append(row)
        del calls
        torch.cuda.empty_cache()
    return rows


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its targets, and whether it met them. `drawn` rows have those of drawn shapes."""
    shape, what, limits = (row["rows"], row["vocabulary"], row["width"]), row["what"], {}
    if "model" in row:
        limits["of_torch"] = WORST_OF_TORCH[what]
    elif shape in LARGE and what == "both":
        rows, vocabulary, width = shape
        # Beside results and main_grad, which a call of the plain gradients makes as its own.
        beside = 12 * rows * width + 2 * rows * width + 2 * vocabulary * width + (192 << 20)
        limits |= {"detkern_us": BOTH_US[shape], "detkern_mb": beside / 2**20}
    elif shape in LARGE:
        limits["of_matmul"] = ENTROPY_OF_MATMUL if what == "entropy" else FORWARD_OF_MATMUL
        limits["detkern_mb"] = 64.0
    elif shape[1:] in FEW and what == "forward":
        limits |= {"detkern_us": FEW[shape[1:]], "of_torch": FEW_OF_TORCH}
    missed = [name for name, most in limits.items() if row.get(name, 0) > most]
    return row | {"targets": {name: round(most, 3) for name, most in limits.items()}, "met": not missed}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of drawn rows, by what they compute: the geometric mean and the worst of the time over PyTorch's."""
    found = []
    for what, most in MEAN_OF_TORCH.items():
        ratios = [row["of_torch"] for row in rows if row["what"] == what and "model" in row]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            met = mean <= most and max(ratios) <= WORST_OF_TORCH[what]
            found.append({
                "what": what, "shapes": len(ratios), "mean_of_torch": round(mean, 3),
                "worst_of_torch": max(ratios), "target": most, "met": met,
            })  # fmt: skip
    return found


def sources() -> list[Path]:
    """What the kernels are made of, and what divides their work."""
    from detkern.cu import linear_logp, linear_logp_launch, linear_logp_wgmma, loader

    builds = [*linear_logp_launch.builds(), *linear_logp_wgmma.builds()]
    files = {name for build in builds for name, _ in loader.read_sources(build.source)}
    modules = (linear_logp, linear_logp_launch, linear_logp_wgmma)
    used = {*(loader.FOLDER / name for name in files), *records.product_sources()}
    return sorted(used | {Path(module.__file__) for module in modules})


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time linear_logp against what computes the same.")
    parser.add_argument("--drawn", action="store_true", help="heads of published models, in the record too")
    parser.add_argument("--again", action="store_true", help="a second record with a seed of its own")
    parser.add_argument("--seed", type=int, help="of the drawn heads")
    parser.add_argument("--count", type=int, default=64, help="how many heads (default: 64)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no other shape after this time")
    parser.add_argument("--without", default="", help="peers to leave out, with commas between")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    arguments = parser.parse_args()
    timing.leave_if(timing.missing())
    device, begin, rows = timing.Cuda(), time.monotonic(), []
    wanted: list[tuple[Shape, tuple[str, ...], dict[str, Any]]] = [
        *((shape, ("forward", "entropy", "both"), {}) for shape in LARGE),
        *(((m, *head), ("forward",), {}) for head in FEW for m in FEW_ROWS),
    ]
    if arguments.drawn:
        seed = SEEDS[arguments.again] if arguments.seed is None else arguments.seed
        for index in range(arguments.count):
            head = drawn.draw_head(seed, index)
            about = {"model": head.model, "seed": seed, "index": index}
            wanted.append(((head.rows, head.vocabulary, head.width), ("forward", "both"), about))
    for shape, whats, about in wanted:
        if time.monotonic() - begin > arguments.seconds:
            break
        for row in measure(device, shape, whats, arguments.without.split(",")):
            rows.append(judge(row | about))
            print(records.shown(rows[-1]), flush=True)
    rows += summary(rows)
    for row in rows:
        if "shapes" in row:
            print(records.shown(row))
    records.write_here(f"linear-logp{'-again' * arguments.again}", rows, sources(), arguments.output)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
