"""NumPy arrays through a platform's library: copied to a device, computed there, copied back. The self-check runs on
this, where no framework need be at hand."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ..abi import mirror
from ..abi.library import Library
from ..dispatch import selfcheck
from ..dispatch.backend import Implementation
from ..operations.operation import Operation, Sample
from ..tensors.execution import Execution
from ..tensors.view import Device, TensorView, contiguous_strides
from ..vocabulary.dtypes import E4M3, DType

__all__ = ["computed"]


class _Place:
    """A device's memory, freed with `memory`. execution: on the default stream."""

    def __init__(self, library: Library, device: Device, memory: ExitStack) -> None:
        self._library, self._device, self._memory = library, device, memory
        self.execution = Execution(device, 0, lambda size: self.new((size,), E4M3))

    def new(self, shape: tuple[int, ...], dtype: DType) -> TensorView:
        """Zeros: a library's memory holds anything at first."""
        return self.put(np.zeros(shape, dtype.numpy), dtype)

    def put(self, array: npt.NDArray[Any], dtype: DType) -> TensorView:
        """A copy of a NumPy array, row-major."""
        array = np.ascontiguousarray(array)
        pointer = self._memory.enter_context(self._library.memory(self._device.index, array.nbytes))
        self._library.copy(self._device.index, pointer, array.ctypes.data, array.nbytes, mirror.TO_DEVICE)
        return TensorView(pointer, array.shape, contiguous_strides(array.shape), dtype, self._device)

    def fetch(self, view: TensorView) -> npt.NDArray[Any]:
        """What is in memory that was made here."""
        out = np.zeros(view.shape, view.dtype.numpy)
        self._library.copy(self._device.index, out.ctypes.data, view.pointer, out.nbytes, mirror.TO_HOST)
        return out


def computed(
    library: Library, device: Device, operation: Operation[Any], implementation: Implementation[Any], sample: Sample
) -> npt.NDArray[Any]:
    """A sample's result on a device, as NumPy."""
    with ExitStack() as memory:
        return selfcheck.computed_at(_Place(library, device, memory), operation, implementation, sample)
