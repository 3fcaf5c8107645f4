"""What the problems of all operations are made of: matrices and vectors in memory, without their addresses.

All strides are in elements of the operand's own type and may be zero or negative; that of a dimension of size one,
which is never used, is zero whatever the array says.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..tensors.view import TensorView
from ..vocabulary.dtypes import DType

__all__ = ["Matrix", "Vector", "alignment_of", "batch_offsets", "matrix_of", "plain_matrix"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stack of matrices in memory. `alignment` is the largest power of two, at most 16, that divides the address."""

    dtype: DType
    batch_strides: tuple[int, ...]
    row_stride: int
    col_stride: int
    alignment: int

    def aligned(self, *strides: int) -> bool:
        """Whether the address, these strides and those of the batch are multiples of 16 bytes."""
        unit = 16 // self.dtype.itemsize
        return self.alignment == 16 and not any(stride % unit for stride in (*strides, *self.batch_strides))


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector in memory."""

    dtype: DType
    stride: int
    alignment: int


def batch_offsets(batch: tuple[int, ...], *matrices: Matrix) -> tuple[tuple[int, ...], ...]:
    """For each index of the leading batch dimensions, whose sizes `batch` gives, what is added to each matrix's
    address, in bytes; indices in row-major order. For backends whose kernels count fewer dimensions than a problem
    has."""
    return tuple(
        tuple(
            matrix.dtype.itemsize * sum(i * stride for i, stride in zip(index, matrix.batch_strides, strict=False))
            for matrix in matrices
        )
        for index in itertools.product(*map(range, batch))
    )


def alignment_of(pointer: int) -> int:
    return min(pointer & -pointer, 16) or 16


def matrix_of(view: TensorView, batch_strides: tuple[int, ...], rows: int, row_stride: int) -> Matrix:
    columns, col_stride = view.shape[-1], view.strides[-1]
    return Matrix(
        view.dtype,
        batch_strides,
        row_stride if rows != 1 else 0,
        col_stride if columns != 1 else 0,
        alignment_of(view.pointer),
    )


def plain_matrix(view: TensorView) -> Matrix:
    return matrix_of(view, (), view.shape[0], view.strides[0])
