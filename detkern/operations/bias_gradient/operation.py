"""The record of the bias gradient, which has one variant."""

from __future__ import annotations

from collections.abc import Iterator

from ...abi import mirror
from ...abi.descriptors import column_sum_descriptors
from ...tensors.types import OUTPUTS
from ...tensors.view import TensorView
from ...vocabulary import operands as generator
from ...vocabulary.dtypes import BF16, F16, F32, DType
from ..memory import matrix_array, vector_array
from ..operation import Descriptor, Operation, PublicCall, Sample
from ..problem import Operands
from .problem import ColumnSumProblem, column_sum_problem
from .replay import column_sum

__all__ = ["BIAS_GRADIENT"]

_N = 40
_DEPTHS = (8, 33, 128, 515)
_SHAPES = ((0, 3), (1, 1), (31, 3), (130, 9), (257, 20), (1000, 7))


def _bind(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> ColumnSumProblem:
    (dc,) = operands
    assert dc is not None
    return column_sum_problem(dc, out, accumulate)


def _misfit(problem: ColumnSumProblem) -> str | None:
    for name, dtype in (("dc", problem.dc.dtype), ("out", problem.out.dtype)):
        if dtype not in OUTPUTS:
            return f"{name} may be float32, float16 or bfloat16, not {dtype}"
    return None


def _replay(problem: ColumnSumProblem, operands: Operands, out: TensorView) -> None:
    if problem.n == 0:
        return
    (dc,) = operands
    assert dc is not None
    target = vector_array(out.pointer, problem.n, problem.out)
    target[...] = column_sum(
        matrix_array(dc.pointer, (*problem.batch, problem.m, problem.n), problem.dc),
        initial=target if problem.accumulate else None,
        out_dtype=problem.out.dtype,
    )


def _cases(variant: str, dtype: DType) -> Iterator[Sample]:
    """Every kind of operands, from +0 and from a starting accumulator."""
    for number, kind in enumerate(generator.KINDS):
        for m in _DEPTHS:
            dc = generator.generate(kind, dtype, (m, _N), number)
            for initial in (None, generator.generate(kind, F32, (_N,), number)):
                about = f"{kind} operands, m={m}, from {'zero' if initial is None else 'an accumulator'}"
                yield Sample(variant, (dc,), (_N,), dtype if initial is None else F32, initial, about=about)


def _samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for m, n in _SHAPES:
        dc = generator.generate(kind, dtype, (m, n), seed)
        for out_dtype in (F32, F16, BF16):
            yield Sample(variant, (dc,), (n,), out_dtype, about=f"{m} x {n} > {out_dtype.short}")
        yield Sample(variant, (dc,), (n,), F32, generator.generate(kind, F32, (n,), 9), about=f"{m} x {n}, onto out")


def _addresses(operands: Operands, out: TensorView) -> tuple[int, ...]:
    (dc,) = operands
    assert dc is not None
    return dc.pointer, out.pointer


BIAS_GRADIENT: Operation[ColumnSumProblem] = Operation(
    name="bias_gradient",
    problem=ColumnSumProblem,
    variants={"bias_gradient": OUTPUTS},
    variant_of=lambda problem: ("bias_gradient", problem.dc.dtype),
    bind=_bind,
    misfit=_misfit,
    replay=_replay,
    piece="all columns",
    cases=_cases,
    samples=_samples,
    independent=lambda variant: (1,),
    call=lambda variant: PublicCall("detkern", "bias_gradient", ("dc",)),
    descriptor=Descriptor(
        3, {"bias_gradient": 0},
        mirror.ColumnSumDescriptor, ("dc", "out"), _addresses, column_sum_descriptors,
        lambda problem, tiles: "at most 1024 columns",
    ),
)  # fmt: skip
