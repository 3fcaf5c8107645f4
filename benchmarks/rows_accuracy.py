"""How accurate the row operations are, beside PyTorch's on this CPU:
`python -m benchmarks.rows_accuracy [--output DIR]`.

Root mean square errors against float64, each relative to its result, of normal numbers (of their magnitudes for `sum`
and `mean`, which otherwise cancel). The bits of a row operation are the same on every backend, so these are every
device's. PyTorch squares in the operand's type, so its mean square is given binary32. Writes <DIR or
benchmarks/results/cpu-<model>>/rows-accuracy.json and ends with status 1 where an error is above PyTorch's by more than
2 %, which the choice of operands makes of equal ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from detkern.measure import records, timing

from .cpu_gemm import cpu_model

WIDTHS = (16, 128, 1024, 4096, 32_768, 151_936, 262_144)
TYPES = ("float32", "float16", "bfloat16")
ELEMENTS = 1 << 21  # of a case, so that means over few numbers do not decide
LIMIT = 1.02


def _log_softmax(x: Any) -> Any:
    z = x - x.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


EXACT: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "mean_square": lambda x: (x**2).mean(-1),
    "softmax": lambda x: np.exp(_log_softmax(x)),
    "log_softmax": _log_softmax,
}
PEERS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(-1),
    "mean": lambda t: t.mean(-1),
    "mean_square": lambda t: t.float().pow(2).mean(-1).to(t.dtype),
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(-1),
}


def measured() -> list[dict[str, Any]]:
    """A row for each type, width and operation."""
    import torch

    from detkern import rows
    from detkern.vocabulary.dtypes import F32
    from detkern.vocabulary.operands import generate

    found = []
    for type_name in TYPES:
        for width in WIDTHS:
            count = max(ELEMENTS // width, 16)
            x = torch.from_numpy(generate("normal", F32, (count, width), width)).to(getattr(torch, type_name))
            for name, exactly in EXACT.items():
                given = x.abs() if name in ("sum", "mean") else x
                exact = exactly(given.double().numpy())
                errors = {
                    library: float(np.sqrt(np.mean(((result.double().numpy() - exact) / exact) ** 2)))
                    for library, result in (("detkern", getattr(rows, name)(given)), ("torch", PEERS[name](given)))
                }
                row = {
                    "operation": name, "type": type_name, "rows": count, "n": width,
                    **{f"{library}_error": float(f"{error:.3e}") for library, error in errors.items()},
                    "met": errors["detkern"] <= LIMIT * errors["torch"],
                }  # fmt: skip
                found.append(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return found


def sources() -> list[Path]:
    """What computes the bits on a CPU."""
    folder = records.ROOT / "detkern" / "cpu"
    return [folder / name for name in ("rows.cpp", "exponential.h", "simd.h", "packing.cpp", "floats.h")]


def main() -> int:
    """Measure, print, record. Status 1 where PyTorch's error is smaller."""
    parser = argparse.ArgumentParser(description="Measure the row operations' accuracy beside PyTorch's.")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/cpu-<model>")
    arguments = parser.parse_args()
    timing.leave_if(timing.no_torch())
    rows = measured()
    cpu = cpu_model()
    folder = arguments.output or records.RESULTS / f"cpu-{records.slug(cpu)}"
    print(records.write("rows-accuracy", rows, gpu=cpu, driver="", sources=sources(), folder=folder))
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
