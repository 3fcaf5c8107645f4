"""CuPy arrays, and CUDA memory in CuPy arrays for frameworks that have no allocator which could be asked."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from ..errors import ArgumentError, DeviceError
from ..vocabulary.dtypes import DTYPES, E4M3, INDICES, DType
from .adapter import Adapter
from .dlpack import Exported
from .execution import Execution
from .overlap import byte_range
from .streams import cupy_runtime, cupy_stream, order
from .types import refuse_type
from .view import Device, TensorView, contiguous_strides, element_strides

__all__ = ["cupy_adapter", "cupy_memory", "current_stream", "exported", "external_execution"]

_TYPES = {dtype.numpy: dtype for dtype in (*DTYPES, *INDICES)}
# CuPy's own memory, whose sizes hold. That of imported arrays (UnownedMemory, DLPack) CuPy makes up from their shapes.
_SIZED = ("PooledMemory", "Memory", "MemoryAsync", "ManagedMemory")


def current_stream(cupy: Any, device: Device) -> int:
    """The raw handle of CuPy's current stream on `device`."""
    try:
        handle: int = cupy.cuda.get_current_stream(device.index).ptr
    except (cupy.cuda.runtime.CUDARuntimeError, OverflowError) as error:
        raise DeviceError(f"{device} cannot be used here: {error}") from error
    return handle


def cupy_memory(shape: tuple[int, ...], dtype: Any, execution: Execution) -> Any:
    """A new CuPy array from CuPy's pool, in the arena of the execution's stream."""
    cupy = cupy_runtime(execution.device)
    with cupy.cuda.Device(execution.device.index), cupy_stream(cupy, execution.device, execution.stream):
        return cupy.empty(shape, dtype)


def external_execution(device: Device, stream: int) -> Execution:
    """Work on a raw stream with scratch memory from CuPy's pool."""

    def allocate(size: int) -> TensorView:
        memory = cupy_memory((size,), "u1", execution)
        return TensorView(memory.data.ptr, (size,), (1,), E4M3, device, False, memory)

    execution = Execution(device, stream, allocate)
    return execution


def exported(view: TensorView, execution: Execution) -> Exported:
    """The CuPy array of unsigned integers behind a result, for import by another framework."""
    cupy = cupy_runtime(execution.device)
    array = view.array

    def make(**keywords: Any) -> Any:
        # CuPy makes the importer's stream wait for its own current one, so that must be the stream of the work.
        with cupy.cuda.Device(execution.device.index), cupy_stream(cupy, execution.device, execution.stream):
            return array.__dlpack__(**keywords)

    return Exported(array, view.dtype, make)


@cache
def cupy_adapter() -> Adapter:
    """The adapter over the CuPy that the caller has imported."""
    return _CuPy(sys.modules["cupy"])


class _CuPy(Adapter):
    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
        self._sized = tuple(getattr(cupy.cuda.memory, name) for name in _SIZED if hasattr(cupy.cuda.memory, name))
        self._devices: dict[int, Device] = {}
        self._executions: dict[tuple[int, int], Execution] = {}

    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        return self._strided(array, argument, planned_copies, False)

    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        return self._strided(array, argument, None, True)

    def _strided(self, array: Any, argument: str, planned_copies: list[str] | None, writable: bool) -> TensorView:
        dtype = _TYPES.get(array.dtype)
        if dtype is None:
            raise refuse_type(argument, array.dtype.name, f"{argument}.astype(cupy.float32)")
        index = array.device.id
        device = self._devices.get(index)
        if device is None:
            device = self._devices[index] = Device(self._kind, index)
        shape = array.shape
        self._refuse_short(array, argument)
        strides = element_strides(shape, array.strides, dtype.itemsize)
        if strides is None:
            reason = (
                f"{argument}: strides of {array.strides} bytes are not multiples of its {dtype.itemsize}-byte elements"
            )
            if writable:
                raise ArgumentError(f"{reason}; give one whose strides are, such as a contiguous array")
            strides = contiguous_strides(shape)
            if planned_copies is not None:
                planned_copies.append(reason)
                return TensorView(0, shape, strides, dtype, device)
            with self._cupy.cuda.Device(index):
                array = self._cupy.ascontiguousarray(array)
        return TensorView(array.data.ptr, shape, strides, dtype, device, False, array)

    def _refuse_short(self, array: Any, argument: str) -> None:
        """ArgumentError for an array beyond its memory: freed by hand, or made by as_strided or from a short buffer."""
        memory, pointer = array.data.mem, array.data.ptr
        if type(memory) not in self._sized or array.size == 0:
            return
        low, high = byte_range(array.shape, array.strides, 1)
        high += array.itemsize - 1
        if not memory.ptr:
            raise ArgumentError(
                f"{argument} has had its memory freed: the memory holds 0 bytes and the array needs {high - low}; give "
                f"an "
                "array whose memory is there"
            )
        low, high = pointer + low - memory.ptr, pointer + high - memory.ptr
        if low < 0 or high > memory.size:
            raise ArgumentError(
                f"{argument} {list(array.shape)} goes beyond its memory: the memory holds {memory.size} bytes and the "
                f"array "
                f"needs bytes {low} to {high} of it; give a view that stays inside"
            )

    def execution(self, device: Device) -> Execution:
        stream = current_stream(self._cupy, device)
        execution = self._executions.get((device.index, stream))
        if execution is None:
            execution = external_execution(device, stream)
            if len(self._executions) > 256:
                self._executions.clear()
            self._executions[device.index, stream] = execution
        return execution

    def empty(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, execution: Execution
    ) -> TensorView:
        cupy = self._cupy
        if cupy.cuda.runtime.getDevice() == execution.device.index:
            array = cupy.empty(shape, dtype.numpy)
        else:
            with cupy.cuda.Device(execution.device.index):
                array = cupy.empty(shape, dtype.numpy)
        return TensorView(array.data.ptr, shape, strides, dtype, execution.device, False, array)

    def join(self, array: Any, execution: Execution) -> None:
        order(execution.device, current_stream(self._cupy, execution.device), execution.stream)

    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        order(execution.device, execution.stream, current_stream(self._cupy, execution.device))

    def cast(self, argument: str, dtype: DType) -> str:
        library = "cupy" if dtype.name in ("float32", "float16") else "ml_dtypes"
        return f"{argument}.astype({library}.{dtype.name})"
