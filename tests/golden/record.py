"""Record the golden digests on a GPU: `python -m tests.golden.record [--output DIR]`.

Writes <DIR or tests/golden>/<gpu>.json: for each case the SHA-256 of the GPU's result (little-endian, row-major). The
operands come from detkern's versioned generator, so that a machine without a GPU can check that its replay gives the
GPU's bits; tests/test_golden.py does.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import detkern
from detkern.operations.table import OPERATIONS
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, by_name

__all__ = ["FOLDER", "Case", "cases", "host_operands", "operation_digests", "operation_samples"]

FOLDER = Path(__file__).parent

# M, N, K: ragged ends, one leaf and one short of it, many leaves of a tree, K = 0.
SHAPES = ((33, 65, 31), (17, 31, 33), (64, 40, 257), (5, 7, 4100), (130, 66, 512), (3, 4, 0))
# The output type (None: the operands'), the type of a bias, and whether the chain starts at an accumulator.
EPILOGUES: tuple[tuple[DType | None, DType | None, bool], ...] = (
    (None, None, False),
    (F32, None, True),
    (F16, F32, False),
    (BF16, BF16, False),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One result. out, bias: names of types, bias None where there is none; seed: of a; b, bias and the starting
    accumulator have the three after it."""

    contract: str
    dtype: str
    kind: str
    m: int
    n: int
    k: int
    out: str
    bias: str | None
    accumulate: bool
    seed: int


def cases(contracts: list[str]) -> Iterator[Case]:
    """Every kind of operands on every contract and type; shapes and epilogues go round."""
    turns = itertools.count()
    for name in contracts:
        for dtype in CONTRACTS[name].operands:
            for kind in operands.KINDS:
                for _ in range(3):
                    turn = next(turns)
                    m, n, k = SHAPES[turn % len(SHAPES)]
                    out, bias, accumulate = EPILOGUES[turn // 2 % len(EPILOGUES)]
                    yield Case(
                        name, dtype.short, kind, m, n, k, (out or dtype).short, None if bias is None else bias.short,
                        accumulate, 4 * turn,
                    )  # fmt: skip


def host_operands(case: Case) -> tuple[Any, Any, Any, Any]:
    """a [M, K], b [K, N], bias [N] or None, the starting accumulator [M, N] or None, as NumPy arrays."""
    dtype = by_name(case.dtype)
    assert dtype is not None
    bias_dtype = None if case.bias is None else by_name(case.bias)
    return (
        operands.generate(case.kind, dtype, (case.m, case.k), case.seed),
        operands.generate(case.kind, dtype, (case.k, case.n), case.seed + 1),
        None if bias_dtype is None else operands.generate(case.kind, bias_dtype, (case.n,), case.seed + 2),
        operands.generate(case.kind, F32, (case.m, case.n), case.seed + 3) if case.accumulate else None,
    )


def operation_samples() -> Iterator[tuple[str, str, Any, Any]]:
    """(key, variant, operation, sample) of every operation other than a product: a few of each kind of operands."""
    for operation in OPERATIONS:
        if set(operation.variants) <= set(CONTRACTS):
            continue
        for variant, dtypes in operation.variants.items():
            for turn, kind in enumerate(operands.KINDS):
                dtype = dtypes[turn % len(dtypes)]
                samples = list(operation.samples(variant, dtype, kind, 3))
                for index in dict.fromkeys((turn % len(samples), 7 * turn % len(samples))):
                    yield f"{variant} {dtype.short} {kind} {index}", variant, operation, samples[index]


def operation_digests(place: Any, fetch: Any, backend: str) -> dict[str, str]:
    """The digest of each of these samples' results.
    place, fetch: NumPy arrays to where the backend computes, and back."""
    found = {}
    for key, variant, operation, sample in operation_samples():
        arrays = [None if x is None else place(x) for x in sample.operands]
        arguments = {"out_dtype": sample.dtype.name}
        if sample.initial is not None:
            arguments = {"out": place(sample.initial), "accumulate": True}
        found[key] = operands.digest(fetch(operation.call(variant)(arrays, sample.shape, backend=backend, **arguments)))
    return found


def _on_gpu(case: Case) -> str:
    """The digest of the GPU's result. PyTorch carries the arrays: it has every type."""
    import torch

    def tensor(array: Any) -> Any:
        if array is None:
            return None
        integers = torch.from_numpy(array.view(f"i{array.dtype.itemsize}")).cuda()
        return integers.view(getattr(torch, array.dtype.name))

    a, b, bias, initial = map(tensor, host_operands(case))
    result = detkern.gemm(
        a, b, bias=bias, out=initial, accumulate=case.accumulate, contract=case.contract, backend="cuda",
        out_dtype=None if case.accumulate else case.out,
    )  # fmt: skip
    integers = result.view({2: torch.int16, 4: torch.int32}[result.element_size()]).cpu().numpy()
    return operands.digest(integers)


def main() -> int:
    """Record every case on cuda:0."""
    parser = argparse.ArgumentParser(description="Record digests of results on this GPU.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for the file (default tests/golden)")
    arguments = parser.parse_args()

    from detkern.cu.backend import BACKEND
    from detkern.cu.device import describe, missing
    from detkern.dispatch import registry
    from detkern.operations.gemm.operation import GEMM
    from detkern.tensors import Device

    if reason := missing(0):
        print(f"no GPU to record on: {reason}")
        return 1
    offered = list(dict.fromkeys(name for name, _ in registry.computed(BACKEND, GEMM, Device("cuda", 0))))
    facts = describe(0)
    record = {
        "gpu": facts.name,
        "driver": facts.driver,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "operands": operands.VERSION,
        "cases": [dataclasses.asdict(case) | {"digest": _on_gpu(case)} for case in cases(offered)],
    }
    from detkern.cli import devices

    device = Device("cuda", 0)
    record["operations"] = operation_digests(lambda x: devices.place(x, device), devices.fetch, "cuda")
    name = re.sub(r"[^a-z0-9]+", "-", facts.name.lower().removeprefix("nvidia").strip())
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{name}.json"
    lines = ",\n".join("  " + json.dumps(case) for case in record.pop("cases"))
    head = json.dumps(record, indent=1)[:-2]
    path.write_text(f'{head},\n "cases": [\n{lines}\n ]\n}}\n')
    print(path, len(lines.splitlines()), "digests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
