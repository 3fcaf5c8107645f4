"""NumPy arrays over the memory of a problem's matrices, and views of NumPy arrays: how replays reach what they compute
on."""

from __future__ import annotations

from ctypes import c_char
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..tensors.view import Device, TensorView
from ..vocabulary.dtypes import from_numpy
from .matrix import Matrix, Vector

__all__ = ["HOST", "host_view", "matrix_array", "vector_array"]

HOST = Device("cpu")

Array = npt.NDArray[Any]


def matrix_array(pointer: int, shape: tuple[int, ...], matrix: Matrix) -> Array:
    """The host memory of a matrix as a NumPy array, without a copy; strides of any sign."""
    dtype = matrix.dtype.numpy
    if 0 in shape:
        return np.empty(shape, dtype)
    strides = [s * dtype.itemsize for s in (*matrix.batch_strides, matrix.row_stride, matrix.col_stride)]
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    below, above = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    memory: Any = (c_char * (above - below + dtype.itemsize)).from_address(pointer + below)
    return np.ndarray(shape, dtype, memory, offset=-below, strides=strides)


def vector_array(pointer: int, size: int, vector: Vector) -> Array:
    """The host memory of a vector, likewise."""
    row: Array = matrix_array(pointer, (1, size), Matrix(vector.dtype, (), 0, vector.stride, vector.alignment))[0]
    return row


def host_view(array: Array, argument: str = "operand") -> TensorView:
    """A view of a NumPy array. ArgumentError where it has no element type of detkern's."""
    dtype = from_numpy(array.dtype)
    if dtype is None:
        raise ArgumentError(f"{argument} of {array.dtype} has no kernel")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, HOST, array=array)
