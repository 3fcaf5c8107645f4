"""Host time of a decode step of Llama and Qwen3 with and without batch_invariant_mode:
`python -m benchmarks.decode_host [--output DIR]`.

One sequence, one token a step, a KV cache that grows, no gradients; the models of benchmarks.train_step. µs that the
calling thread spends in the model's forward, with the device waited for after each step, so that it never holds the
host up: the median over the steps of all turns, the variants in turn. Under the mode at most 1.15 of eager attention's
without it.

`--profile N` prints the N functions that take most of the mode's steps by themselves, by cProfile.

Needs a CUDA device, PyTorch, CuPy and transformers: ends with status 2 and a sentence where they are missing, with 1 if
a target is missed. `--cpu` runs tiny models on the CPU, where a step computes as well, and records nothing. Writes <DIR
or benchmarks/results/<gpu>>/decode-host.json.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detkern.measure import records

from . import language_model

__all__ = ["compare", "main", "measure", "sources"]

TURNS, WARM, STEPS = 12, 2, 24  # of a turn: steps
PROMPT = 16
LIMIT = 1.15
# name: attention, under the mode (None: under one that only calls what it is given: what PyTorch takes for any), and
# whether the cache has all its room from the start, with a mask over what is not filled: the sizes of its products stay
# the same.
VARIANTS: dict[str, tuple[str, bool | None, bool]] = {
    "fused attention": ("sdpa", False, False),
    "eager attention": ("eager", False, False),
    "a function mode that does nothing": ("eager", None, False),
    "mode": ("eager", True, False),
    "mode, fused attention": ("sdpa", True, False),
    "eager attention, static cache": ("eager", False, True),
    "mode, static cache": ("eager", True, True),
}
PEERS = {"mode": "eager attention", "mode, static cache": "eager attention, static cache"}


def _nothing() -> None:
    pass


def _empty_mode() -> Any:
    from torch.overrides import TorchFunctionMode

    class Empty(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs) if kwargs else func(*args)

    return Empty()


class Decoding:
    """A model that has read a prompt and writes one token after the other."""

    def __init__(self, model: Any, attention: str, mode: bool | None, static: bool, wait: Callable[[], Any]) -> None:
        self.model, self.attention, self.mode, self.static, self.wait = model, attention, mode, static, wait

    def turn(self, steps: int) -> list[float]:
        """µs of each step."""
        import torch
        from transformers import DynamicCache, StaticCache

        language_model.attend(self.model, self.attention)
        prompt = language_model.tokens(self.model, 1, PROMPT)
        token, config = prompt[:, :1].clone(), self.model.config
        cache = StaticCache(config=config, max_cache_len=128) if self.static else DynamicCache(config=config)
        times = []
        mode = _empty_mode() if self.mode is None else language_model.mode(self.mode)
        known = {language_model.cache_argument(self.model): cache, "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad(), mode:
            self.model(input_ids=prompt, **known)
            self.wait()
            gc.collect()
            gc.disable()
            try:
                for _ in range(steps):
                    begin = time.perf_counter_ns()
                    self.model(input_ids=token, **known)
                    times.append((time.perf_counter_ns() - begin) / 1000)
                    self.wait()
            finally:
                gc.enable()
        return times


def decodings(name: str, device: str, sizes: dict[str, int]) -> dict[str, Decoding]:
    """The variants, on one model."""
    import torch

    model = language_model.make(name, device, sizes).eval()
    wait: Callable[[], Any] = _nothing if device == "cpu" else torch.cuda.synchronize
    return {variant: Decoding(model, *settings, wait) for variant, settings in VARIANTS.items()}


def measure(variants: dict[str, Decoding], name: str, turns: int, steps: int) -> list[dict[str, Any]]:
    """A row for each variant of a model, with the median and the 90th percentile of its steps."""
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(WARM + turns):
        for variant, one in variants.items():
            found = one.turn(steps)
            if turn >= WARM:
                times[variant] += found
    return [
        {
            "model": name, "variant": variant, "steps": len(found), "host_us": round(statistics.median(found), 1),
            "p90_us": round(statistics.quantiles(found, n=10)[-1], 1), "least_us": round(min(found), 1),
        }
        for variant, found in times.items()
    ]  # fmt: skip


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each variant that has a peer among the rows: its median over the peer's, and whether it is in the limit."""
    by_name = {row["variant"]: row for row in rows}
    found = []
    for variant, peer in PEERS.items():
        ratio = by_name[variant]["host_us"] / by_name[peer]["host_us"]
        found.append(
            {
                "model": by_name[variant]["model"], "variant": variant, "peer": peer, "ratio": round(ratio, 3),
                "least_ratio": round(by_name[variant]["least_us"] / by_name[peer]["least_us"], 3), "target": LIMIT,
                "met": ratio <= LIMIT,
            }
        )  # fmt: skip
    return found


def profiled(one: Decoding, steps: int, count: int) -> str:
    """The functions that take most of a variant's steps by themselves."""
    profiler = cProfile.Profile()
    one.turn(2)
    profiler.enable()
    one.turn(steps)
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:count]  # type: ignore[attr-defined]
    lines = [f"of {steps} steps: calls and µs of a step, by itself"]
    for (path, line, name), (_, calls, own, _, _) in rows:
        where = "/".join(Path(path).parts[-3:])
        lines.append(f"  {calls / steps:8.1f} {1e6 * own / steps:9.1f}  {where}:{line} {name[:70]}")
    return "\n".join(lines)


def sources() -> list[Path]:
    """What host time depends on."""
    package = records.ROOT / "detkern"
    return sorted(
        [*package.glob("torch/**/*.py"), *package.glob("tensors/*.py"), *package.glob("dispatch/*.py"),
         *package.glob("operations/**/*.py"), *package.glob("cu/*.py"), package / "api.py", package / "rows.py"]
    )  # fmt: skip


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time decode steps on the host with and without batch_invariant_mode.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--model", choices=language_model.MODELS, action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of each variant that count")
    parser.add_argument("--profile", type=int, metavar="N", help="print so many functions of the mode's steps")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU; records nothing")
    arguments = parser.parse_args()
    language_model.leave_if_missing(arguments.cpu)
    device, sizes = ("cpu", language_model.SMALL) if arguments.cpu else ("cuda", language_model.LARGE)
    rows: list[dict[str, Any]] = []
    for name in arguments.model or language_model.MODELS:
        variants = decodings(name, device, sizes)
        measured = measure(variants, name, arguments.turns, STEPS)
        compared = compare(measured)
        for row in measured + compared:
            print(records.shown(row), flush=True)
        rows += measured + compared
        if arguments.profile:
            print(profiled(variants["mode"], STEPS, arguments.profile), flush=True)
    if not arguments.cpu:
        records.write_here("decode-host", rows, sources(), arguments.output)
    return int(not all(row.get("met", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
