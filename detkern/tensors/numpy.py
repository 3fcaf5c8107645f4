"""NumPy arrays, with bfloat16 and float8 from ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError, DTypeError
from ..vocabulary.dtypes import DTYPES, E4M3, INDICES, DType
from .adapter import Adapter
from .execution import Execution
from .types import refuse_type
from .view import Device, TensorView, contiguous_strides, element_strides

__all__ = ["CPU", "NUMPY", "host_memory", "ndarray_of", "scratch"]

CPU = Device("cpu")
_TYPES: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in (*DTYPES, *INDICES)}


def host_memory(size: int, alignment: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`size` new bytes at an address that `alignment` divides."""
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


def scratch(size: int) -> TensorView:
    """Scratch memory on the host."""
    memory = host_memory(size, 64)
    return TensorView(memory.ctypes.data, (size,), (1,), E4M3, CPU, False, memory)


class _Interface:
    """Memory at an address, as NumPy takes it."""

    def __init__(self, view: TensorView) -> None:
        size = view.dtype.itemsize
        self.owner = view.array
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer, view.readonly),
            "shape": view.shape,
            "strides": tuple(step * size for step in view.strides),
            "typestr": f"|u{size}" if size == 1 else view.dtype.bits.str,
        }


def ndarray_of(view: TensorView) -> np.ndarray[Any, Any]:
    """A NumPy array over the memory of a view on the CPU; it keeps the memory's owner alive."""
    if view.pointer == 0:
        return np.empty(view.shape, view.dtype.numpy)
    return np.asarray(_Interface(view)).view(view.dtype.numpy)


class _NumPy(Adapter):
    name = "numpy"

    def __init__(self) -> None:
        self._execution = Execution(CPU, 0, scratch)

    def _strided(self, array: Any, argument: str, planned_copies: list[str] | None, writable: bool) -> TensorView:
        dtype = _TYPES.get(array.dtype)
        if dtype is None or type(array) is not np.ndarray:
            dtype = self._checked(array, argument)
        strides = element_strides(array.shape, array.strides, dtype.itemsize)
        if strides is None:
            reason = (
                f"{argument}: strides of {array.strides} bytes are not multiples of its {dtype.itemsize}-byte elements"
            )
            if writable:
                raise ArgumentError(f"{reason}; give one whose strides are, such as a contiguous array")
            strides = contiguous_strides(array.shape)
            if planned_copies is not None:
                planned_copies.append(reason)
                return TensorView(0, array.shape, strides, dtype, CPU)
            array = np.ascontiguousarray(array)
        return TensorView(array.ctypes.data, array.shape, strides, dtype, CPU, not array.flags.writeable, array)

    def _checked(self, array: Any, argument: str) -> DType:
        """The type of an array that is not plainly an ndarray of a known type, or why it is refused."""
        kind = type(array)
        if isinstance(array, np.ma.MaskedArray):
            raise DTypeError(
                f"{argument} is a masked array, and a product has no place for the mask; fill it, as in "
                f"{argument}.filled(0)"
            )
        if kind is not np.ndarray and kind is not np.memmap:
            raise DTypeError(
                f"{argument} is a {kind.__module__}.{kind.__qualname__}, whose own rules a product would drop; "
                f"give the plain array, np.asarray({argument})"
            )
        if not array.dtype.isnative:
            raise DTypeError(
                f"{argument} is {array.dtype.newbyteorder('=').name} in the other byte order; convert it, as in "
                f"{argument}.astype(np.{array.dtype.newbyteorder('=').name}) "
                f"({argument}.byteswap() with a new dtype does it in place)"
            )
        dtype = _TYPES.get(array.dtype)
        if dtype is None:
            raise refuse_type(argument, array.dtype.name, f"{argument}.astype(np.float32)")
        return dtype

    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        return self._strided(array, argument, planned_copies, False)

    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        return self._strided(array, argument, None, True)

    def execution(self, device: Device) -> Execution:
        return self._execution

    def empty(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, execution: Execution
    ) -> TensorView:
        array = np.empty(shape, dtype.numpy)
        pointer = array.ctypes.data
        if pointer & 15:  # an allocator that somebody has put in place of NumPy's
            size = array.nbytes
            array = host_memory(size, 64).view(dtype.numpy).reshape(shape)
            pointer = array.ctypes.data
        return TensorView(pointer, shape, strides, dtype, CPU, False, array)

    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        raise AssertionError("NumPy arrays are on the CPU")

    def cast(self, argument: str, dtype: DType) -> str:
        library = "np" if dtype.name in ("float32", "float16") else "ml_dtypes"
        return f"{argument}.astype({library}.{dtype.name})"


NUMPY = _NumPy()
