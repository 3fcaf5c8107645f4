"""The problem of a scattered sum: rows added to the destinations that an index names, one chain for each element."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...tensors.view import Device, TensorView
from ..matrix import Matrix, Vector, alignment_of, plain_matrix

__all__ = ["ScatterSumProblem", "scatter_sum_problem"]


@dataclass(frozen=True, slots=True)
class ScatterSumProblem:
    """out[r, :] = the chain of source[i, :] over the i with index[i] = r, ascending; rows of out are `rows`.

    accumulate: the chains start at out, and a row that no index names is left as it is; else they start at +0. A source
    whose index is outside of [0, rows) belongs to no row. There may be no sources.
    """

    operation: ClassVar[str] = "scatter_sum"

    device: Device
    m: int
    n: int
    rows: int
    source: Matrix
    index: Vector
    out: Matrix
    accumulate: bool

    def __hash__(self) -> int:
        return hash((self.m, self.n, self.rows, self.source.dtype.code, self.out.dtype.code, self.accumulate))

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"the scattered sum of m={self.m}, n={self.n} to {self.rows} rows"

    def with_rows(self, m: int) -> ScatterSumProblem:
        """The same layout with another number of sources, neither number being 1."""
        return self if m == self.m else replace(self, m=m)


def scatter_sum_problem(source: TensorView, index: TensorView, out: TensorView, accumulate: bool) -> ScatterSumProblem:
    """The problem of views that already fit: source [M, N], index [M], out [rows, N]."""
    m, n = source.shape
    return ScatterSumProblem(
        device=out.device,
        m=m,
        n=n,
        rows=out.shape[0],
        source=plain_matrix(source),
        index=Vector(index.dtype, index.strides[0] if m != 1 else 0, alignment_of(index.pointer)),
        out=plain_matrix(out),
        accumulate=accumulate,
    )
