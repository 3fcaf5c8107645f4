"""A training step of Llama and Qwen3 with and without batch_invariant_mode:
`python -m benchmarks.train_step [--output DIR]`.

Eight layers, 4096 wide, 14,336 in the MLP, 32 heads of queries and 8 of keys, a vocabulary of 128,256, 4 × 1,024
tokens, bfloat16, random weights. A step is forward, loss and backward, without the optimizer. The variants are taken in
turn in one process:

    fused attention        PyTorch's scaled_dot_product_attention
    eager attention        Hugging Face's attention out of products and softmax: the peer
    mode                   the same under batch_invariant_mode(strict=True)
    eager, float32 grads   every gradient added to a float32 tensor as it comes: the peer of
    mode, main_grad        convert(model, accumulate=True) under the mode

A row has the median ms on the device (events around a step), the peak of allocated memory, and the kernels that take
most of a step, by name, with their ms and their number. The other rows compare: at most 1.05 of the peer's time and
memory.

Needs a CUDA device, PyTorch, CuPy and transformers: ends with status 2 and a sentence where they are missing, with 1 if
a target is missed. `--cpu` runs tiny models on the CPU and records nothing. Writes <DIR or
benchmarks/results/<gpu>>/train-step.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from detkern.measure import records

from . import language_model

__all__ = ["Variant", "compare", "kernels", "main", "measure", "sources"]

TURNS, WARM = 9, 2
LIMIT = 1.05
KERNELS = 10
NAME = 100  # characters of a kernel's name

# name: attention, under the mode, gradients in float32.
VARIANTS = {
    "fused attention": ("sdpa", False, False),
    "eager attention": ("eager", False, False),
    "mode": ("eager", True, False),
    "eager, float32 grads": ("eager", False, True),
    "mode, main_grad": ("eager", True, True),
}
PEERS = {"mode": "eager attention", "mode, main_grad": "eager, float32 grads"}


class Variant:
    """A way to run the step. What it sets on the model it takes away again."""

    def __init__(self, name: str, model: Any, ids: Any) -> None:
        self.name, self.model, self.ids = name, model, ids
        self.attention, self.mode, self.wide = VARIANTS[name]
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        import detkern.torch as dt

        language_model.attend(self.model, self.attention)
        self.model.zero_grad(set_to_none=True)
        if self.wide and self.mode:
            dt.convert(self.model, accumulate=True)
            dt.zero_main_grads(self.model)
        elif self.wide:
            import torch

            for parameter in self.model.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_add_in_float32))
        return self

    def __exit__(self, *error: object) -> None:
        import detkern.torch as dt

        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.wide and self.mode:
            dt.revert(self.model)
        for parameter in self.model.parameters():
            for name in ("main_grad", "further_main_grads"):
                parameter.__dict__.pop(name, None)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with language_model.mode(self.mode):
            self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()


def _add_in_float32(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def timed(run: Callable[[], None], device: str) -> float:
    """ms of one step: on a GPU between two events around it."""
    import torch

    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    second.record()
    second.synchronize()
    return float(first.elapsed_time(second))


def kernels(run: Callable[[], None], device: str) -> list[dict[str, Any]]:
    """The kernels (on the CPU: the ops) of a step, those that take longest first: name, ms, count."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device != "cpu"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [event for event in found.key_averages() if getattr(event, of) > 0]
    events.sort(key=lambda event: -getattr(event, of))
    return [
        {"kernel": event.key[:NAME], "ms": round(getattr(event, of) / 1000, 3), "count": event.count}
        for event in events
    ]


def measure(
    name: str, device: str, sizes: dict[str, int], shape: tuple[int, int], turns: int, variants: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each variant of a model, and one for each that has a peer."""
    import torch

    model = language_model.make(name, device, sizes)
    ids = language_model.tokens(model, *shape)
    rows = []
    for variant in variants:
        with Variant(variant, model, ids) as one:
            one.step()  # compiles
            if device != "cpu":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            one.step()
            peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
            found = kernels(one.step, device)
        rows.append(
            {
                "model": name, "variant": variant, "tokens": ids.numel(), "type": "bfloat16", "ms": 0.0,
                "peak_mb": peak >> 20,
                "busy_ms": round(sum(kernel["ms"] for kernel in found), 3),
                "launches": sum(kernel["count"] for kernel in found), "kernels": found,
            }
        )  # fmt: skip
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(WARM + turns):
        for variant in variants:
            with Variant(variant, model, ids) as one:
                one.step()  # the caches of memory as this variant leaves them
                taken = timed(one.step, device)
            if turn >= WARM:
                times[variant].append(taken)
    for row in rows:
        row["ms"] = round(statistics.median(times[row["variant"]]), 3)
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each variant that has a peer among the rows: time and memory over the peer's, and whether both are in the
    limit."""
    by_name = {row["variant"]: row for row in rows}
    found = []
    for variant, peer in PEERS.items():
        if variant not in by_name or peer not in by_name:
            continue
        ours, theirs = by_name[variant], by_name[peer]
        time_ratio = ours["ms"] / theirs["ms"]
        memory_ratio = ours["peak_mb"] / theirs["peak_mb"] if theirs["peak_mb"] else 1.0
        found.append(
            {
                "model": ours["model"], "variant": variant, "peer": peer, "ratio": round(time_ratio, 3),
                "memory_ratio": round(memory_ratio, 3), "target": LIMIT,
                "met": time_ratio <= LIMIT and memory_ratio <= LIMIT,
            }
        )  # fmt: skip
    return found


def sources() -> list[Path]:
    """What a step's time depends on."""
    package = records.ROOT / "detkern"
    return sorted([*records.cuda_sources(), *package.glob("torch/**/*.py"), *package.glob("cu/*.py")])


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time training steps with and without batch_invariant_mode.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--model", choices=language_model.MODELS, action="append", help="default: all")
    parser.add_argument("--variant", choices=list(VARIANTS), action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=TURNS, help="steps of each variant that count")
    parser.add_argument("--top", type=int, default=KERNELS, help="so many kernels are printed and recorded")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU; records nothing")
    arguments = parser.parse_args()
    language_model.leave_if_missing(arguments.cpu)
    device, sizes, shape = (
        ("cpu", language_model.SMALL, (2, 16)) if arguments.cpu else ("cuda", language_model.LARGE, (4, 1024))
    )
    rows: list[dict[str, Any]] = []
    for name in arguments.model or language_model.MODELS:
        measured = measure(name, device, sizes, shape, arguments.turns, arguments.variant or list(VARIANTS))
        for row in measured:
            row["kernels"] = row["kernels"][: arguments.top]
            print(records.shown({key: value for key, value in row.items() if key != "kernels"}), flush=True)
            for kernel in row["kernels"]:
                print(f"  {kernel['ms']:9.3f} ms {kernel['count']:6d}  {kernel['kernel']}", flush=True)
        compared = compare(measured)
        for row in compared:
            print(records.shown(row), flush=True)
        rows += measured + compared
    if not arguments.cpu:
        records.write_here("train-step", rows, sources(), arguments.output)
    return int(not all(row.get("met", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
