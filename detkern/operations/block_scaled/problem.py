"""The problem of an FP8 product with scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...tensors.view import Device, TensorView
from ...vocabulary.contracts import Contract
from ..matrix import Matrix, plain_matrix

__all__ = ["BlockScaledProblem", "block_scaled_problem"]


@dataclass(frozen=True, slots=True)
class BlockScaledProblem:
    """out[m, n] = sum over blocks of 128 k of scale_a[m, block] * scale_b[block, n] * block product (+ out).

    The row and column strides of the scales follow that notation; a stride may be zero.
    """

    operation: ClassVar[str] = "block_scaled_gemm"

    contract: Contract
    device: Device
    m: int
    n: int
    k: int
    a: Matrix
    scale_a: Matrix
    b: Matrix
    scale_b: Matrix
    out: Matrix
    accumulate: bool

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"{self.contract} product of m={self.m}, n={self.n}, k={self.k}"

    def with_rows(self, m: int) -> BlockScaledProblem:
        """The same layout with another number of rows, neither number being 1."""
        return self if m == self.m else replace(self, m=m)


def block_scaled_problem(
    contract: Contract,
    a: TensorView,
    scale_a: TensorView,
    b: TensorView,
    scale_b: TensorView,
    out: TensorView,
    accumulate: bool,
) -> BlockScaledProblem:
    """The problem of views that already fit: a [M, K], scale_a [M, K/128], b [K, N], scale_b [K/128, N], out [M, N]."""
    return BlockScaledProblem(
        contract=contract,
        device=out.device,
        m=out.shape[0],
        n=out.shape[1],
        k=a.shape[1],
        a=plain_matrix(a),
        scale_a=plain_matrix(scale_a),
        b=plain_matrix(b),
        scale_b=plain_matrix(scale_b),
        out=plain_matrix(out),
        accumulate=accumulate,
    )
