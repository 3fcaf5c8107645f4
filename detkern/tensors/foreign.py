"""Arrays that detkern knows only by a protocol: `__dlpack__`, or `__cuda_array_interface__` where that is all they
have.

A result goes back through the framework's own `from_dlpack` (of its array namespace, else of the top module of its
type) and is a NumPy or CuPy array where there is none, or where that one cannot take the element type. CUDA work goes
to CuPy's current stream.
"""

from __future__ import annotations

import sys
from operator import index
from typing import Any

from ..errors import ArgumentError, DeviceError, DTypeError
from ..vocabulary.dtypes import E4M3, F16, F32, I32, I64, DType
from .adapter import Adapter
from .cupy import cupy_memory, current_stream, exported, external_execution
from .dlpack import Exported, device_of, read
from .execution import Execution
from .numpy import CPU, host_memory, scratch
from .streams import cupy_runtime, keep, order, synchronize
from .types import refuse_type
from .view import Device, TensorView, contiguous_strides, element_strides

__all__ = ["CUDA_ARRAY_INTERFACE", "DLPACK"]


def _importer(array: Any) -> Any:
    """The framework's from_dlpack, or None."""
    namespace = getattr(array, "__array_namespace__", None)
    if namespace is not None:
        return getattr(namespace(), "from_dlpack", None)
    top = type(array).__module__.partition(".")[0]
    return getattr(sys.modules.get(top), "from_dlpack", None)


class _Foreign(Adapter):
    """What the two protocols share: where work runs, and where results live."""

    def __init__(self) -> None:
        self._cpu = Execution(CPU, 0, scratch)

    def execution(self, device: Device) -> Execution:
        if device.kind == "cpu":
            return self._cpu
        return external_execution(device, current_stream(cupy_runtime(device), device))

    def empty(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, execution: Execution
    ) -> TensorView:
        device = execution.device
        if device.kind == "cpu":
            size = E4M3.itemsize
            for n in (*shape, dtype.itemsize):
                size *= n
            array = host_memory(size, 64).view(dtype.bits).reshape(shape)
            return TensorView(array.ctypes.data, shape, strides, dtype, device, False, array)
        array = cupy_memory(shape, dtype.bits, execution)
        return TensorView(array.data.ptr, shape, strides, dtype, device, False, array)

    def result(self, like: Any, view: TensorView, execution: Execution) -> Any:
        importer = _importer(like)
        if importer is not None and 0 not in view.shape:
            if execution.device.kind == "cpu":
                array = Exported(view.array, view.dtype, view.array.__dlpack__)
            else:
                array = exported(view, execution)
            try:
                return importer(array)
            except (BufferError, TypeError, ValueError, RuntimeError, NotImplementedError):
                pass  # no such element type there
        return view.array.view(view.dtype.numpy)

    def cast(self, argument: str, dtype: DType) -> str:
        return f"a cast of {argument} to {dtype.name}"


class _DLPack(_Foreign):
    name = "dlpack"
    stream_ordered = False

    def _read(self, array: Any, argument: str, stream: int | None) -> tuple[TensorView, bool]:
        cast = f"a cast of {argument} to float32"
        device = device_of(array, argument)
        if device.kind != "cpu":
            handle = self.execution(device).stream if stream is None else stream
            imported = read(array, argument, cast, stream=handle or 1)
        else:
            imported = read(array, argument, cast)
        pointer, shape, strides, dtype, found, readonly, copied, owner = imported
        if found != device:
            raise DeviceError(f"{argument}.__dlpack_device__() names {device}, but what it exports is on {found}")
        return TensorView(pointer, shape, strides, dtype, device, readonly, (array, owner)), copied

    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        return self._read(array, argument, stream)[0]

    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        view, copied = self._read(array, argument, stream)
        if copied:
            raise ArgumentError(f"{argument} exports a copy of its memory, so nothing written would reach it")
        return view

    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        if written:
            synchronize(execution.device, execution.stream)  # DLPack has no way to name the stream to a later reader
        else:
            keep(execution.device, execution.stream, view.array)


_CAI_TYPES = {"f4": F32, "f2": F16, "i4": I32, "i8": I64}
_CAI_NAMES = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}


class _CudaArrayInterface(_Foreign):
    name = "cuda array interface"
    stream_ordered = False

    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        return self._strided(array, argument)

    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        return self._strided(array, argument)

    def _strided(self, array: Any, argument: str) -> TensorView:
        try:
            interface = array.__cuda_array_interface__
            mask, typestr, (pointer, readonly) = interface.get("mask"), interface["typestr"], interface["data"]
            byte_order, kind, size = typestr[0], typestr[1], int(typestr[2:])
            pointer = index(pointer or 0)
            shape = tuple(index(size) for size in interface["shape"])
            steps = interface.get("strides")
            steps = None if steps is None else tuple(index(step) for step in steps)
            self._stream(array)
        except Exception as error:  # the array's own code, which may raise or say anything
            said = str(error) or type(error).__name__
            raise DTypeError(f"{argument}.__cuda_array_interface__ cannot be read: {said}") from error
        if mask is not None:
            raise DTypeError(f"{argument} is masked, and a product has no place for the mask; fill it")
        dtype = _CAI_TYPES.get(typestr[1:]) if byte_order in "<=" else None
        if dtype is None:
            if kind == "V":
                raise DTypeError(
                    f"{argument} has the type string {typestr!r}, with which __cuda_array_interface__ cannot say "
                    "which type of that size it is; export bfloat16 and float8 through __dlpack__"
                )
            if byte_order == ">":
                raise DTypeError(f"{argument} is big-endian ({typestr!r}); convert it to the device's byte order")
            found = f"{_CAI_NAMES.get(kind, typestr)}{size * 8}"
            raise refuse_type(argument, found, f"a cast of {argument} to float32")
        if any(n < 0 for n in shape) or (steps is not None and len(steps) != len(shape)):
            raise ArgumentError(
                f"{argument} has the shape {list(shape)} and strides of {steps} bytes, which fit no array"
            )
        if not pointer and 0 not in shape:
            raise ArgumentError(f"{argument} {list(shape)} is at a null pointer")
        strides = contiguous_strides(shape) if steps is None else element_strides(shape, steps, dtype.itemsize)
        if strides is None:
            raise ArgumentError(
                f"{argument}: strides of {steps} bytes are not multiples of its {dtype.itemsize}-byte elements; "
                "give a contiguous array"
            )
        return TensorView(pointer, shape, strides, dtype, self._device(pointer, argument), bool(readonly), array)

    @staticmethod
    def _stream(array: Any) -> int | None:
        """The raw handle of the stream that produces the array; None where it need not be waited for."""
        stream = array.__cuda_array_interface__.get("stream")
        return None if stream is None else index(stream)

    def _device(self, pointer: int, argument: str) -> Device:
        runtime = cupy_runtime(Device("cuda")).cuda.runtime
        try:
            return Device("cuda", runtime.pointerGetAttributes(pointer).device if pointer else runtime.getDevice())
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"{argument} is on no CUDA device that can be used here: {error}") from error

    def join(self, array: Any, execution: Execution) -> None:
        if (stream := self._stream(array)) is not None:
            order(execution.device, stream, execution.stream)

    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        if (stream := self._stream(array)) is not None:
            order(execution.device, execution.stream, stream)
        elif written:
            synchronize(execution.device, execution.stream)
        else:
            keep(execution.device, execution.stream, array)


DLPACK = _DLPack()
CUDA_ARRAY_INTERFACE = _CudaArrayInterface()
