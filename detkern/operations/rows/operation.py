"""The record of the row operations: their variants are the kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...abi import mirror
from ...abi.descriptors import row_descriptors
from ...tensors.types import OUTPUTS
from ...tensors.view import TensorView
from ...vocabulary import operands as generator
from ...vocabulary.dtypes import BF16, F16, F32, DType
from ..memory import matrix_array
from ..operation import Descriptor, Operation, PublicCall, Sample
from ..problem import Operands
from .problem import RowKind, RowProblem, one_a_row, operand_names, row_problem
from .replay import rows

__all__ = ["KINDS", "ROWS"]

KINDS = {kind.label: kind for kind in RowKind}

# Rows and columns: rows that begin at multiples of 16 bytes and that do not, of a warp; some also of a CTA and a
# cluster.
_ROWS = ((16, 1), (16, 67), (16, 128), (16, 600))
_WIDE_ROWS = ((5, 4096), (3, 9001), (2, 20_011))
_SHAPES = ((2, 0), (1, 1), (5, 31), (17, 130), (33, 257), (3, 1000))


def _bind(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> RowProblem:
    kind = KINDS[variant]
    a, b = operands if len(operands) == 2 else (operands[0], None)
    assert a is not None
    width = b.shape[-1] if b is not None else out.shape[-1] if kind.spreads else a.shape[-1]
    return row_problem(kind, one_a_row(a) if kind.spreads else a, b, one_a_row(out) if kind.reduces else out, width)


def _misfit(problem: RowProblem) -> str | None:
    for dtype in (problem.a.dtype, problem.out.dtype, (problem.b or problem.a).dtype):
        if dtype not in OUTPUTS:
            return f"{problem.kind.label} takes and gives float32, float16 and bfloat16, not {dtype}"
    return None


def _replay(problem: RowProblem, operands: Operands, out: TensorView) -> None:
    batch, m, n, kind = problem.batch, problem.m, problem.n, problem.kind
    a, b = operands if len(operands) == 2 else (operands[0], None)
    assert a is not None
    first = matrix_array(a.pointer, (*batch, m, 1 if kind.spreads else n), problem.a)
    second = None if b is None or problem.b is None else matrix_array(b.pointer, (*batch, m, n), problem.b)
    target = matrix_array(out.pointer, (*batch, m, 1 if kind.reduces else n), problem.out)
    for index in np.ndindex(*batch):
        result = rows(
            kind,
            first[index][:, 0] if kind.spreads else first[index],
            None if second is None else second[index],
            width=n,
            out_dtype=problem.out.dtype,
        )
        target[index] = result[:, None] if kind.reduces else result


def _sample(
    variant: str, name: str, dtype: DType, shape: tuple[int, int], seed: int, out_dtype: DType, about: str
) -> Sample:
    kind = KINDS[variant]
    if name == "logits":
        a = (8 * generator.generate("normal", F32, shape, seed)).astype(dtype.numpy)
    else:
        a = generator.generate(name, dtype, shape, seed)
    if kind.spreads:
        a = generator.generate(name, dtype, shape[:1], seed) if shape[1] == 0 else np.ascontiguousarray(a[:, 0])
    arrays: tuple[Any, ...] = (a,)
    if kind.operands == 2:
        arrays = (a, generator.generate("normal" if name == "logits" else name, dtype, shape, seed + 100))
    return Sample(
        variant, arrays, shape[:1] if kind.reduces else shape, out_dtype,
        about=about or f"{name} operands, n={shape[1]}",
    )  # fmt: skip


def _cases(variant: str, dtype: DType) -> Iterator[Sample]:
    """Every kind of operands, and rows of softmax's own range."""
    for number, name in enumerate(("logits", *generator.KINDS)):
        for shape in _ROWS + _WIDE_ROWS * (name in ("logits", "bits")):
            yield _sample(variant, name, dtype, shape, number, F32, "")


def _samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for shape in _SHAPES:
        for out_dtype in (F32, F16, BF16):
            about = f"{shape[0]} x {shape[1]} > {out_dtype.short}"
            yield _sample(variant, kind, dtype, shape, seed, out_dtype, about)


def _call(variant: str) -> PublicCall:
    kind = KINDS[variant]
    names = operand_names(kind)
    if kind.spreads and kind.operands == 1:
        return PublicCall("detkern.rows", variant, names, sized=lambda shape: {"width": shape[-1]})
    return PublicCall("detkern.rows", variant, names)


def _addresses(operands: Operands, out: TensorView) -> tuple[int, ...]:
    a, b = operands if len(operands) == 2 else (operands[0], None)
    assert a is not None
    return a.pointer, 0 if b is None else b.pointer, out.pointer


ROWS: Operation[RowProblem] = Operation(
    name="rows",
    problem=RowProblem,
    variants=dict.fromkeys(KINDS, OUTPUTS),
    variant_of=lambda problem: (problem.kind.label, (problem.b or problem.a).dtype),
    bind=_bind,
    misfit=_misfit,
    replay=_replay,
    piece="262144 elements at a time",
    cases=_cases,
    samples=_samples,
    independent=lambda variant: (0,) * KINDS[variant].operands,
    call=_call,
    descriptor=Descriptor(
        4, {label: int(kind) for label, kind in KINDS.items()},
        mirror.RowDescriptor, ("a", "b", "out"), _addresses, row_descriptors,
        lambda problem, tiles: "a row at a time" if problem.kind.scans else "rows in vector lanes",
    ),
)  # fmt: skip
