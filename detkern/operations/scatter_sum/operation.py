"""The record of the scattered sum, which has one variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...tensors.types import OUTPUTS
from ...tensors.view import TensorView
from ...vocabulary import operands as generator
from ...vocabulary.dtypes import BF16, F16, F32, INDICES, DType
from ..memory import matrix_array, vector_array
from ..operation import Operation, PublicCall, Sample
from ..problem import Operands
from .problem import ScatterSumProblem, scatter_sum_problem
from .replay import scatter_sum

__all__ = ["SCATTER_SUM"]

# Sources, columns, rows.
_CASES = ((1, 3, 2), (33, 40, 7), (300, 24, 5), (700, 9, 300))
_SHAPES = ((0, 3, 4), (1, 1, 1), (31, 3, 8), (257, 20, 40), (130, 9, 3), (1000, 1, 70), (400, 7, 1000))


def _bind(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> ScatterSumProblem:
    source, index = operands
    assert source is not None
    assert index is not None
    return scatter_sum_problem(source, index, out, accumulate)


def _misfit(problem: ScatterSumProblem) -> str | None:
    for name, dtype in (("source", problem.source.dtype), ("out", problem.out.dtype)):
        if dtype not in OUTPUTS:
            return f"{name} may be float32, float16 or bfloat16, not {dtype}"
    if problem.index.dtype not in INDICES:
        return f"index may be int32 or int64, not {problem.index.dtype}"
    return None


def _replay(problem: ScatterSumProblem, operands: Operands, out: TensorView) -> None:
    source, index = operands
    assert source is not None
    assert index is not None
    scatter_sum(
        matrix_array(source.pointer, (problem.m, problem.n), problem.source),
        vector_array(index.pointer, problem.m, problem.index),
        matrix_array(out.pointer, (problem.rows, problem.n), problem.out),
        accumulate=problem.accumulate,
    )


def _index(m: int, rows: int, seed: int) -> npt.NDArray[Any]:
    """Of these numbers in turn: any, with some that name no row; most of them one; ascending."""
    words = generator.generate("bits", F32, (m,), seed + 50).view(np.uint32).astype(np.int64)
    index = words // 8 % (rows + 2) - 1
    if seed % 3 == 1:
        index = np.where(words % 8 > 0, rows // 2, index)
    elif seed % 3 == 2:
        index = np.sort(index)
    return index.astype(INDICES[seed % 2].numpy)


def _sample(
    variant: str, kind: str, dtype: DType, sizes: tuple[int, int, int], seed: int, out_dtype: DType, onto: bool
) -> Sample:
    m, n, rows = sizes
    operands = (generator.generate(kind, dtype, (m, n), seed), _index(m, rows, seed))
    initial = generator.generate(kind, out_dtype, (rows, n), seed + 9) if onto else None
    about = f"{kind} operands, m={m}, n={n}, rows={rows} > {out_dtype.short}{', onto out' if onto else ''}"
    return Sample(variant, operands, (rows, n), out_dtype, initial, about=about)


def _cases(variant: str, dtype: DType) -> Iterator[Sample]:
    """Every kind of operands, from +0 and from a starting accumulator."""
    for number, kind in enumerate(generator.KINDS):
        for turn, sizes in enumerate(_CASES):
            for onto in (False, True):
                yield _sample(variant, kind, dtype, sizes, number + turn, F32 if onto else dtype, onto)


def _samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for number, sizes in enumerate(_SHAPES):
        for out_dtype in (F32, F16, BF16):
            yield _sample(variant, kind, dtype, sizes, seed + number, out_dtype, False)
        yield _sample(variant, kind, dtype, sizes, seed + number, F32, True)


SCATTER_SUM: Operation[ScatterSumProblem] = Operation(
    name="scatter_sum",
    problem=ScatterSumProblem,
    variants={"scatter_sum": OUTPUTS},
    variant_of=lambda problem: ("scatter_sum", problem.source.dtype),
    bind=_bind,
    misfit=_misfit,
    replay=_replay,
    piece="a source of every row at a time",
    cases=_cases,
    samples=_samples,
    independent=lambda variant: (1, None),
    along=1,
    call=lambda variant: PublicCall(
        "detkern", "scatter_sum", ("source", "index"), sized=lambda shape: {"rows": shape[0]}
    ),
)
