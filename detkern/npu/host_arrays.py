"""NumPy arrays through a platform's library: copied to a device, computed there, copied back. The self-check runs on this, where
no framework need be at hand."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ..abi import mirror
from ..abi.descriptors import column_sum_descriptor, gemm_descriptors
from ..abi.library import Library
from ..contracts import Contract
from ..dtypes import F32, from_numpy
from ..operations.bias_gradient.problem import column_sum_problem
from ..operations.gemm.problem import gemm_problem
from ..tensors import Device, TensorView

__all__ = ["column_sum", "product"]

Array = npt.NDArray[Any]


def product(library: Library, device: Device, contract: Contract, a: Array, b: Array, initial: Array | None) -> Array:
    """The product of NumPy arrays a [M, K] and b [K, N] on a device, as a NumPy array."""
    out = np.zeros((a.shape[0], b.shape[1]), a.dtype) if initial is None else np.array(initial, np.float32)
    with ExitStack() as memory:
        left, right, target = (_place(library, device, array, memory) for array in (a, b, out))
        problem = gemm_problem(contract, left, right, target, None, initial is not None)
        ((template, _),) = gemm_descriptors(problem)
        descriptor = mirror.GemmDescriptor.from_buffer_copy(template)
        descriptor.device = device.index
        descriptor.a, descriptor.b, descriptor.out = left.pointer, right.pointer, target.pointer
        size = library.gemm_scratch(descriptor)
        descriptor.scratch, descriptor.scratch_bytes = memory.enter_context(library.memory(device.index, size)), size
        library.gemm(descriptor)
        library.copy(device.index, out.ctypes.data, target.pointer, out.nbytes, mirror.TO_HOST)
    return out


def column_sum(library: Library, device: Device, dc: Array, initial: Array | None) -> Array:
    """The bias gradient of a NumPy array dc [M, N] on a device, as a NumPy array."""
    out = np.zeros(dc.shape[1], dc.dtype) if initial is None else np.array(initial, np.float32)
    with ExitStack() as memory:
        rows, target = (_place(library, device, array, memory) for array in (dc, out))
        problem = column_sum_problem(rows, target, initial is not None)
        descriptor = mirror.ColumnSumDescriptor.from_buffer_copy(column_sum_descriptor(problem))
        descriptor.device = device.index
        descriptor.dc, descriptor.out = rows.pointer, target.pointer
        library.column_sum(descriptor)
        library.copy(device.index, out.ctypes.data, target.pointer, out.nbytes, mirror.TO_HOST)
    return out


def _place(library: Library, device: Device, array: Array, memory: ExitStack) -> TensorView:
    """A view of a copy of the array on a device, freed with `memory`."""
    array = np.ascontiguousarray(array)
    pointer = memory.enter_context(library.memory(device.index, array.nbytes))
    library.copy(device.index, pointer, array.ctypes.data, array.nbytes, mirror.TO_DEVICE)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return TensorView(pointer, array.shape, strides, from_numpy(array.dtype) or F32, device)
