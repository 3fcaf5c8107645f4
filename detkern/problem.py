"""One frozen dataclass per op: everything that a backend needs to choose and launch a kernel, except the pointers.

A problem is hashable, so it is the key of every cache of launch plans. All strides are in elements of the operand's own
type and may be zero or negative; that of a dimension of size one, which is never used, is zero whatever the array says.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from .contracts import Contract
from .dtypes import DType
from .tensors import Device, TensorView

__all__ = [
    "BlockScaledProblem",
    "ColumnSumProblem",
    "GemmProblem",
    "Matrix",
    "RowKind",
    "RowProblem",
    "Vector",
    "batch_offsets",
    "block_scaled_problem",
    "column_sum_problem",
    "gemm_problem",
    "row_problem",
]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stack of matrices in memory. `alignment` is the largest power of two, at most 16, that divides the address."""

    dtype: DType
    batch_strides: tuple[int, ...]
    row_stride: int
    col_stride: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector in memory."""

    dtype: DType
    stride: int
    alignment: int


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """out[*batch, m, n] = contract(a[*batch, m, k], b[*batch, k, n]) (+ out) (+ bias[n]).

    Batch dimensions are merged as far as the strides allow; a batch over which `b` is broadcast is merged into `m`
    where the rows of `a` and `out` line up.
    """

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


@dataclass(frozen=True, slots=True)
class BlockScaledProblem:
    """out[m, n] = sum over blocks of 128 k of scale_a[m, block] * scale_b[block, n] * block product (+ out).

    The row and column strides of the scales follow that notation; a stride may be zero.
    """

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


@dataclass(frozen=True, slots=True)
class ColumnSumProblem:
    """out[n] = the chain of dc[*batch, m, n] over all rows, those of one batch index after those of the one before.

    Batch dimensions are merged with each other and with the rows as far as the strides allow; those of size one are left
    out, so there are at most 61 where the rows can be counted in 63 bits. There may be no rows: then the batch is () and
    m is 0.
    """

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


class RowKind(IntEnum):
    """The row operations; the values are those of `detkern_row_kind` in abi/abi.h."""

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

    @property
    def label(self) -> str:
        """The name of the public function."""
        return self.name.lower()

    @property
    def reduces(self) -> bool:
        """Whether a row becomes one number."""
        return self <= RowKind.MEAN_SQUARE

    @property
    def spreads(self) -> bool:
        """Whether the first operand is one number a row."""
        return RowKind.SUM_BACKWARD <= self <= RowKind.MEAN_SQUARE_BACKWARD

    @property
    def operands(self) -> int:
        """How many operands it has: a gradient other than that of a sum or a mean also needs what the forward saw."""
        return 2 if self >= RowKind.MEAN_SQUARE_BACKWARD else 1


@dataclass(frozen=True, slots=True)
class RowProblem:
    """out[*batch, m, :] = the operation of `kind` on a[*batch, m, :] (and b[*batch, m, :]), over n columns.

    What has one number a row (`a` where the kind spreads, `out` where it reduces) has column stride 0. Batch dimensions are
    merged with each other and with the rows as far as the strides of all operands allow. n may be 0; there are rows.
    """

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


def batch_offsets(batch: tuple[int, ...], *matrices: Matrix) -> tuple[tuple[int, ...], ...]:
    """For each index of the leading batch dimensions, whose sizes `batch` gives, what is added to each matrix's address, in
    bytes; indices in row-major order. For backends whose kernels count fewer dimensions than a problem has."""
    return tuple(
        tuple(
            matrix.dtype.itemsize * sum(i * stride for i, stride in zip(index, matrix.batch_strides, strict=False))
            for matrix in matrices
        )
        for index in itertools.product(*map(range, batch))
    )


def _alignment(pointer: int) -> int:
    return min(pointer & -pointer, 16) or 16


def _matrix(view: TensorView, batch_strides: tuple[int, ...], rows: int, row_stride: int) -> Matrix:
    columns, col_stride = view.shape[-1], view.strides[-1]
    return Matrix(
        view.dtype,
        batch_strides,
        row_stride if rows != 1 else 0,
        col_stride if columns != 1 else 0,
        _alignment(view.pointer),
    )


def _plain(view: TensorView) -> Matrix:
    return _matrix(view, (), view.shape[0], view.strides[0])


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
        a=_matrix(a, a_strides, m, a_row),
        b=_matrix(b, b_strides, k, b.strides[-2]),
        out=_matrix(out, out_strides, m, out_row),
        bias=None if bias is None else Vector(bias.dtype, bias.strides[0], _alignment(bias.pointer)),
        accumulate=accumulate,
    )


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
        dc=_matrix(dc, tuple(stride for _, stride in batch), m, row_stride),
        out=Vector(out.dtype, out.strides[0] if n != 1 else 0, _alignment(out.pointer)),
        accumulate=accumulate,
    )


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
        _matrix(view, tuple(strides[index] for _, strides in batch), m, row_strides[index])
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
        a=_plain(a),
        scale_a=_plain(scale_a),
        b=_plain(b),
        scale_b=_plain(scale_b),
        out=_plain(out),
        accumulate=accumulate,
    )
