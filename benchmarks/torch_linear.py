"""Host time of detkern.torch.linear beside torch.nn.functional.linear's:
`python -m benchmarks.torch_linear [--output DIR]`.

Needs a CUDA device, PyTorch and CuPy. µs that the calling thread spends on a call whose kernels are small, so that the
GPU never holds it up: the median over turns of 200 calls, the two libraries in turn. `--cpu` times CPU tensors, where
the calls compute as well, and records nothing. Rows named "part" say where detkern's time goes. Writes <DIR or
benchmarks/results/<gpu>>/torch-linear.json and ends with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from detkern.measure import records, timing

TURNS = 15
WARM = 3  # turns that are not counted
CALLS = 200
LIMIT = 2.0  # the most of torch.nn.functional.linear's time

ROWS, IN, OUT = 16, 64, 64
CASES = ("no grad", "grad, forward", "grad, forward and backward")


def medians(calls: dict[str, Callable[[], Any]], device: str, recorded: Container[str] = ()) -> dict[str, float]:
    """Median µs of each call; all of them are taken in turn. Autograd records where `recorded` names the call.

    The collector of garbage is off, as in timeit: what it costs a turn depends on all that the process holds.
    """
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM + TURNS):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            gc.disable()
            try:
                with torch.set_grad_enabled(name in recorded):
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    taken = time.perf_counter() - start
            finally:
                gc.enable()
            if turn >= WARM:
                times[name].append(1e6 * taken / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def _tensors(device: str, grad: bool) -> tuple[Any, Any, Any, Any]:
    """x, weight, bias and a gradient of the result."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    leaves = [random(ROWS, IN), random(OUT, IN), random(OUT)]
    return *(leaf.requires_grad_(grad) for leaf in leaves), random(ROWS, OUT)  # type: ignore[return-value]


def linear_rows(device: str) -> list[dict[str, Any]]:
    """A row for each way of calling, with its target."""
    import torch

    import detkern.torch as dt

    calls: dict[str, Callable[[], Any]] = {}
    for with_bias in (True, False):
        for case in CASES:
            x, weight, bias, dy = _tensors(device, case != "no grad")
            leaves = (x, weight, bias) if with_bias else (x, weight)

            def forward(function: Any, leaves: Any = leaves) -> Any:
                return function(*leaves)

            def both(function: Any, leaves: Any = leaves, dy: Any = dy) -> Any:
                return torch.autograd.grad(function(*leaves), leaves, dy)

            call = both if case.endswith("backward") else forward
            name = f"linear, {case}, {'bias' if with_bias else 'no bias'}"
            calls[f"torch: {name}"] = functools.partial(call, torch.nn.functional.linear)
            calls[f"detkern: {name}"] = functools.partial(call, dt.linear)
    # All cases in turn: a backward starts threads, after which everything takes longer.
    found = medians(calls, device, [name for name in calls if ", no grad," not in name])
    rows = []
    for name in [name.removeprefix("torch: ") for name in calls if name.startswith("torch: ")]:
        ours, theirs = found[f"detkern: {name}"], found[f"torch: {name}"]
        rows.append(
            {
                "host": name, "m": ROWS, "n": OUT, "k": IN, "type": "bfloat16", "detkern_us": round(ours, 2),
                "torch_us": round(theirs, 2), "ratio": round(ours / theirs, 3), "target": LIMIT,
                "met": ours / theirs <= LIMIT,
            }
        )  # fmt: skip
        _show(rows[-1])
    x, weight, bias, _ = _tensors(device, False)
    plain = torch.nn.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    converted = dt.Linear.from_torch(plain)
    found = medians({"torch": lambda: plain(x), "detkern": lambda: converted(x)}, device, ("torch", "detkern"))
    rows.append(
        {"host": "Linear, grad, forward", "detkern_us": round(found["detkern"], 2),
            "torch_us": round(found["torch"], 2),
         "ratio": round(found["detkern"] / found["torch"], 3)}
    )  # fmt: skip
    _show(rows[-1])
    return rows


def part_rows(device: str) -> list[dict[str, Any]]:
    """Where the time of a call goes: pieces of the path, each timed alone."""
    import torch

    import detkern
    import detkern.torch as dt
    from detkern.operations.gemm.checks import LINEAR, plan_product
    from detkern.tensors.torch import torch_adapter
    from detkern.torch.functions import eager, route
    from detkern.torch.functions.gradients import Settings

    x, weight, bias, dy = _tensors(device, False)
    leaves = _tensors(device, True)[:3]
    out = dt.linear(x, weight, bias)
    adapter = torch_adapter()
    operands = tuple(adapter.view(tensor, "") for tensor in (x, weight, bias))
    target = adapter.view(out, "")

    def planned() -> Any:
        a, b, column = operands
        return plan_product(LINEAR, a, b, False, True, column, None, None, False, None, None)

    plan, m, _ = planned()
    execution = adapter.execution(target.device)

    def new() -> Any:
        return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)

    class Nothing(torch.autograd.Function):  # type: ignore[misc]
        """What PyTorch itself takes to record an operation in Python."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, settings: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return new()

        @staticmethod
        def backward(ctx: Any, dc: Any) -> Any:
            return None, None, None, None

    settings = Settings(None, None, None)
    calls: dict[str, Callable[[], Any]] = {
        "detkern.linear": lambda: detkern.linear(x, weight, bias),
        "detkern.torch.linear, no grad": lambda: dt.linear(x, weight, bias),
        "of it: past the dispatcher, with the launch": lambda: eager.linear(x, weight, bias, None, None, None),
        "of it: the plan": planned,
        "of it: the launch": lambda: plan.run(m, operands, target, execution),
        "of it: memory for the result": new,
        "of it: whether anything watches": lambda: route.direct(x, weight, bias) and route.recorded(x, weight, bias),
        "an autograd.Function that does nothing": lambda: Nothing.apply(*leaves, settings),
        "detkern.bias_gradient": lambda: detkern.bias_gradient(dy),
        "the same past the dispatcher": lambda: eager.bias_gradient(dy, None, None),
        "torch.ops.detkern.linear, no grad": lambda: torch.ops.detkern.linear.default(x, weight, bias),
    }
    rows = [{"part": name, "host_us": round(taken, 2)} for name, taken in medians(calls, device).items()]
    for row in rows:
        _show(row)
    return rows


def _show(row: dict[str, Any]) -> None:
    print(records.shown(row), flush=True)


def sources() -> list[Path]:
    """What host time depends on."""
    package = records.ROOT / "detkern"
    return sorted(
        [*package.glob("torch/**/*.py"), package / "tensors/torch.py", *package.glob("dispatch/*.py"),
         *package.glob("operations/*/checks.py"), package / "api.py", package / "cu/launch.py",
         package / "cu/extended_launch.py"]
    )  # fmt: skip


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time detkern.torch.linear's host side against PyTorch's own.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    parser.add_argument("--cpu", action="store_true", help="time CPU tensors and record nothing")
    arguments = parser.parse_args()
    timing.leave_if(timing.no_torch() if arguments.cpu else timing.missing())
    device = "cpu" if arguments.cpu else "cuda"
    rows = linear_rows(device) + part_rows(device)
    if not arguments.cpu:
        records.write_here("torch-linear", rows, sources(), arguments.output)
    return int(not all(row.get("met", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
