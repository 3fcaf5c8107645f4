"""The problem of the row operations: one for all of them, told apart by their kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import ClassVar

from ...tensors.view import Device, TensorView
from ..matrix import Matrix, matrix_of

__all__ = ["RowKind", "RowProblem", "one_a_row", "operand_names", "row_problem"]


class RowKind(IntEnum):
    """The row operations; the values are those of `detkern_row_kind` in abi/abi.h.

    reduces:  whether a row becomes one number.
    spreads:  whether the first operand is one number a row.
    scans:    whether a column's result is of the columns up to it, or from it on.
    operands: how many operands it has: a gradient other than that of a sum or a mean also needs what the forward saw.
    """

    reduces: bool
    spreads: bool
    scans: bool
    operands: int

    SUM = 1
    MEAN = 2
    MEAN_SQUARE = 3
    SOFTMAX = 4
    LOG_SOFTMAX = 5
    SUM_BACKWARD = 6
    MEAN_BACKWARD = 7
    MEAN_SQUARE_BACKWARD = 8
    SOFTMAX_BACKWARD = 9
    LOG_SOFTMAX_BACKWARD = 10
    CUMSUM = 11
    CUMSUM_BACKWARD = 12

    def __init__(self, value: int) -> None:
        # Attributes, not properties: every call reads them.
        self.reduces = value <= 3
        self.spreads = 6 <= value <= 8
        self.scans = value >= 11
        self.operands = 2 if 8 <= value <= 10 else 1

    @property
    def label(self) -> str:
        """The name of the public function."""
        return self.name.lower()


_NAMES = {
    RowKind.MEAN_SQUARE_BACKWARD: ("dy", "x"),
    RowKind.SOFTMAX_BACKWARD: ("dy", "y"),
    RowKind.LOG_SOFTMAX_BACKWARD: ("dy", "y"),
}


def operand_names(kind: RowKind) -> tuple[str, ...]:
    """The operands as the public function names them."""
    return _NAMES.get(kind, ("dy",) if kind.label.endswith("_backward") else ("x",))


def one_a_row(view: TensorView) -> TensorView:
    """A view with a column that is one wide."""
    return TensorView(view.pointer, (*view.shape, 1), (*view.strides, 0), view.dtype, view.device)


@dataclass(frozen=True, slots=True)
class RowProblem:
    """out[*batch, m, :] = the operation of `kind` on a[*batch, m, :] (and b[*batch, m, :]), over n columns.

    What has one number a row (`a` where the kind spreads, `out` where it reduces) has column stride 0. Batch dimensions
    are merged with each other and with the rows as far as the strides of all operands allow. n may be 0; there are
    rows.
    """

    operation: ClassVar[str] = "rows"

    kind: RowKind
    device: Device
    batch: tuple[int, ...]
    m: int
    n: int
    a: Matrix
    b: Matrix | None
    out: Matrix

    def __hash__(self) -> int:
        return hash((self.kind, self.m, self.n, self.batch, self.a.dtype.code, self.out.dtype.code))

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"{self.kind.label} of {self.m * prod(self.batch)} rows, n={self.n}"

    def with_rows(self, m: int) -> RowProblem:
        """The same layout with another number of rows, neither number being 1."""
        return self if m == self.m else replace(self, m=m)


def row_problem(kind: RowKind, a: TensorView, b: TensorView | None, out: TensorView, n: int) -> RowProblem:
    """The problem of views that already fit: each [.., n] with the same leading dimensions, or [.., 1] where it has one
    number a row."""
    views = [view for view in (a, b, out) if view is not None]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, *strides in zip(out.shape[:-1], *(view.strides[:-1] for view in views), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == tuple(size * stride for stride in strides):
            merged[-1] = (merged[-1][0] * size, tuple(strides))
        else:
            merged.append((size, tuple(strides)))
    *batch, (m, row_strides) = merged or [(1, (0,) * len(views))]
    matrices = [
        matrix_of(view, tuple(strides[index] for _, strides in batch), m, row_strides[index])
        for index, view in enumerate(views)
    ]
    return RowProblem(
        kind=kind,
        device=out.device,
        batch=tuple(size for size, _ in batch),
        m=m,
        n=n,
        a=matrices[0],
        b=None if b is None else matrices[1],
        out=matrices[-1],
    )
