"""The problem of a bias gradient: a sum of rows, one chain for each column."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...tensors.view import Device, TensorView
from ..matrix import Matrix, Vector, alignment_of, matrix_of

__all__ = ["ColumnSumProblem", "column_sum_problem"]


@dataclass(frozen=True, slots=True)
class ColumnSumProblem:
    """out[n] = the chain of dc[*batch, m, n] over all rows, those of one batch index after those of the one before.

    Batch dimensions are merged with each other and with the rows as far as the strides allow; those of size one are
    left out, so there are at most 61 where the rows can be counted in 63 bits. There may be no rows: then the batch is
    () and m is 0.
    """

    operation: ClassVar[str] = "bias_gradient"

    device: Device
    batch: tuple[int, ...]
    m: int
    n: int
    dc: Matrix
    out: Vector
    accumulate: bool

    def __hash__(self) -> int:
        return hash((self.m, self.n, self.batch, self.dc.dtype.code, self.accumulate))

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"the bias gradient of m={self.m}, n={self.n}"

    def with_rows(self, m: int) -> ColumnSumProblem:
        """The same layout with another number of rows, neither number being 1."""
        return self if m == self.m else replace(self, m=m)


def column_sum_problem(dc: TensorView, out: TensorView, accumulate: bool) -> ColumnSumProblem:
    """The problem of views that already fit: dc [.., N], whose leading dimensions are the rows in row-major order, and
    out [N]."""
    n = dc.shape[-1]
    rows: list[tuple[int, int]] = []
    for size, stride in zip(dc.shape[:-1], dc.strides[:-1], strict=True):
        if size == 1:
            continue
        if rows and rows[-1][1] == size * stride:
            rows[-1] = (rows[-1][0] * size, stride)
        else:
            rows.append((size, stride))
    if 0 in dc.shape[:-1]:
        rows = [(0, 0)]
    *batch, (m, row_stride) = rows or [(1, 0)]
    return ColumnSumProblem(
        device=out.device,
        batch=tuple(size for size, _ in batch),
        m=m,
        n=n,
        dc=matrix_of(dc, tuple(stride for _, stride in batch), m, row_stride),
        out=Vector(out.dtype, out.strides[0] if n != 1 else 0, alignment_of(out.pointer)),
        accumulate=accumulate,
    )
