"""NumPy arrays through the kernels: copied to a device, computed on a stream of their own, copied back. The self-check
runs on this, where no framework but CuPy need be at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..dispatch.backend import Execution
from ..tensors import Device, TensorView
from ..vocabulary.dtypes import E4M3, DType
from .device import CudaDevice

__all__ = ["Place", "placing"]


class Place:
    """CuPy's memory on a device, and a stream. execution: on that stream, with scratch memory from there."""

    def __init__(self, device: Device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self.execution = Execution(device, stream.ptr, lambda size: self.new((size,), E4M3))

    def new(self, shape: tuple[int, ...], dtype: DType) -> TensorView:
        """Memory that is not initialised."""
        import cupy

        return self._view(cupy.empty(shape, dtype.bits), dtype)

    def put(self, array: Any, dtype: DType) -> TensorView:
        """A copy of a NumPy array, row-major."""
        import cupy

        return self._view(cupy.asarray(np.ascontiguousarray(array).view(dtype.bits)), dtype)

    def fetch(self, view: TensorView) -> Any:
        """What is in memory that was made here, as a NumPy array; waits for the stream."""
        import cupy

        return cupy.asnumpy(view.array, stream=self._stream).view(view.dtype.numpy)

    def _view(self, array: Any, dtype: DType) -> TensorView:
        strides = tuple(stride // dtype.itemsize for stride in array.strides)
        return TensorView(array.data.ptr, array.shape, strides, dtype, self._device, array=array)


@contextmanager
def placing(device: CudaDevice) -> Iterator[Place]:
    """A place on a device, which is current in this thread meanwhile, as is the place's stream."""
    import cupy

    with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True) as stream:
        yield Place(Device("cuda", device.index), stream)
