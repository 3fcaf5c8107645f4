"""The record of matrix products: their variants are contracts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...abi import mirror
from ...abi.descriptors import gemm_descriptors
from ...tensors.types import OUTPUTS
from ...tensors.view import TensorView
from ...vocabulary import operands as generator
from ...vocabulary.contracts import CONTRACTS, FP8_BLOCK128
from ...vocabulary.dtypes import BF16, F16, F32, DType
from ..memory import matrix_array, vector_array
from ..operation import Descriptor, Operation, PublicCall, Sample
from ..problem import Operands
from .problem import GemmProblem, gemm_problem
from .replay import gemm

__all__ = ["GEMM"]

_M, _N = 48, 40
_DEPTHS = (8, 33, 128, 515)
_SHAPES = ((2, 3, 0), (1, 1, 1), (1, 24, 65), (5, 3, 31), (17, 9, 130), (33, 20, 257), (4, 7, 1000))


def _bind(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> GemmProblem:
    a, b, bias = operands
    assert a is not None
    assert b is not None
    return gemm_problem(CONTRACTS[variant], a, b, out, bias, accumulate)


def _misfit(problem: GemmProblem) -> str | None:
    contract, dtype = problem.contract, problem.a.dtype
    if contract == FP8_BLOCK128:
        return f"{contract} needs scales; it is block_scaled_gemm's"
    if dtype != problem.b.dtype:
        return f"operands of one type are needed, not {dtype} and {problem.b.dtype}"
    if dtype not in contract.operands:
        takes = ", ".join(d.name for d in contract.operands)
        gives = ", ".join(c.name for c in CONTRACTS.values() if dtype in c.operands)
        return f"{contract} takes {takes}, not {dtype}; {dtype} operands have {gives}"
    if problem.out.dtype not in OUTPUTS:
        return f"out may be float32, float16 or bfloat16, not {problem.out.dtype}"
    return None


def _replay(problem: GemmProblem, operands: Operands, out: TensorView) -> None:
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    if 0 in (*batch, m, n):
        return
    left, right, bias = operands
    assert left is not None
    assert right is not None
    a = matrix_array(left.pointer, (*batch, m, k), problem.a)
    b = matrix_array(right.pointer, (*batch, k, n), problem.b)
    result = matrix_array(out.pointer, (*batch, m, n), problem.out)
    row = None if problem.bias is None or bias is None else vector_array(bias.pointer, n, problem.bias)
    for index in np.ndindex(*batch):
        target = result[index]
        target[...] = gemm(
            problem.contract,
            a[index],
            b[index],
            initial=target if problem.accumulate else None,
            bias=row,
            out_dtype=problem.out.dtype,
        )


def _cases(variant: str, dtype: DType) -> Iterator[Sample]:
    """Every kind of operands, from +0 and from a starting accumulator."""
    for number, kind in enumerate(generator.KINDS):
        for k in _DEPTHS:
            a = generator.generate(kind, dtype, (_M, k), 2 * number)
            b = generator.generate(kind, dtype, (k, _N), 2 * number + 1)
            for initial in (None, generator.generate(kind, F32, (_M, _N), number)):
                start = "zero" if initial is None else "an accumulator"
                yield Sample(
                    variant, (a, b, None), (_M, _N), dtype if initial is None else F32, initial,
                    about=f"{kind} operands, k={k}, from {start}",
                )  # fmt: skip


def _samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for m, n, k in _SHAPES:
        a = generator.generate(kind, dtype, (m, k), 4 * seed)
        b = generator.generate(kind, dtype, (k, n), 4 * seed + 1)
        about = f"{m} x {n} x {k}"
        yield Sample(variant, (a, b, None), (m, n), dtype, about=about)
        yield Sample(
            variant, (a, b, None), (m, n), F32, generator.generate(kind, F32, (m, n), 5), about=f"{about}, onto out"
        )
        for bias_dtype in (F32, F16, BF16):
            bias = generator.generate(kind, bias_dtype, (n,), 6)
            yield Sample(variant, (a, b, bias), (m, n), dtype, about=f"{about}, bias {bias_dtype.short}")


def _addresses(operands: Operands, out: TensorView) -> tuple[int, ...]:
    a, b, bias = operands
    assert a is not None
    assert b is not None
    return a.pointer, b.pointer, out.pointer, 0 if bias is None else bias.pointer


def _tile(problem: GemmProblem, tiles: Sequence[str]) -> str:
    unit = "fma" if problem.contract.step is None else "mma"
    return next(tile.partition("=")[2] for tile in tiles if tile.startswith(unit))


GEMM: Operation[GemmProblem] = Operation(
    name="gemm",
    problem=GemmProblem,
    variants={c.name: c.operands for c in CONTRACTS.values() if c != FP8_BLOCK128},
    variant_of=lambda problem: (problem.contract.name, problem.a.dtype),
    bind=_bind,
    misfit=_misfit,
    replay=_replay,
    piece="8192 outputs at a time",
    cases=_cases,
    samples=_samples,
    independent=lambda variant: (0, None, None),
    call=lambda variant: PublicCall("detkern", "gemm", ("a", "b", "bias"), {"contract": variant}),
    descriptor=Descriptor(
        1, {c.name: c.code for c in CONTRACTS.values() if c != FP8_BLOCK128},
        mirror.GemmDescriptor, ("a", "b", "out", "bias"), _addresses, gemm_descriptors, _tile,
    ),
)  # fmt: skip
