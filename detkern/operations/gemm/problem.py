"""The problem of a matrix product: everything that a backend needs to choose and launch a kernel,
except the pointers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...tensors.view import Device, TensorView
from ...vocabulary.contracts import Contract
from ..matrix import Matrix, Vector, alignment_of, matrix_of

__all__ = ["GemmProblem", "gemm_problem"]


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """out[*batch, m, n] = contract(a[*batch, m, k], b[*batch, k, n]) (+ out) (+ bias[n]).

    Batch dimensions are merged as far as the strides allow; a batch over which `b` is broadcast is merged into `m`
    where the rows of `a` and `out` line up.
    """

    operation: ClassVar[str] = "gemm"

    contract: Contract
    device: Device
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    bias: Vector | None
    accumulate: bool

    def __hash__(self) -> int:
        # Taken at every look-up of a plan; the sizes tell nearly all problems of a process apart.
        return hash((self.contract.code, self.m, self.n, self.k, self.batch, self.accumulate))

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"{self.contract} gemm of m={self.m}, n={self.n}, k={self.k}"

    def with_rows(self, m: int) -> GemmProblem:
        """The same layout with another number of rows, neither number being 1."""
        if m == self.m:
            return self
        # In each call of an m that was never seen, for which dataclasses.replace takes three times as long.
        return GemmProblem(
            self.contract,
            self.device,
            self.batch,
            m,
            self.n,
            self.k,
            self.a,
            self.b,
            self.out,
            self.bias,
            self.accumulate,
        )


def gemm_problem(
    contract: Contract, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None, accumulate: bool
) -> GemmProblem:
    """The problem of views that already fit: a [*batch, M, K], b [*batch, K, N], out [*batch, M, N] with the same
    number of dimensions (broadcast ones have stride 0), bias [N]."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = [
        (size, sa, sb, so)
        for size, sa, sb, so in zip(out.shape[:-2], a.strides[:-2], b.strides[:-2], out.strides[:-2], strict=True)
        if size != 1
    ]
    merged: list[tuple[int, int, int, int]] = []
    for size, sa, sb, so in batch:
        if merged and merged[-1][1:] == (size * sa, size * sb, size * so):
            merged[-1] = (merged[-1][0] * size, sa, sb, so)
        else:
            merged.append((size, sa, sb, so))
    a_row, out_row = a.strides[-2], out.strides[-2]
    if merged and merged[-1][2] == 0:
        size, sa, _, so = merged[-1]
        if m == 1:
            m, a_row, out_row = size, sa, so
            merged.pop()
        elif sa == m * a_row and so == m * out_row:
            m *= size
            merged.pop()
    sizes, a_strides, b_strides, out_strides = zip(*merged, strict=True) if merged else ((), (), (), ())
    return GemmProblem(
        contract=contract,
        device=out.device,
        batch=sizes,
        m=m,
        n=n,
        k=k,
        a=matrix_of(a, a_strides, m, a_row),
        b=matrix_of(b, b_strides, k, b.strides[-2]),
        out=matrix_of(out, out_strides, m, out_row),
        bias=None if bias is None else Vector(bias.dtype, bias.strides[0], alignment_of(bias.pointer)),
        accumulate=accumulate,
    )
