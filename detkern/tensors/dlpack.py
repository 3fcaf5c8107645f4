"""DLPack capsules, read and written through ctypes, because NumPy's own reader knows neither bfloat16 nor float8.

The structures and codes are those of dlpack.h 1.1. A capsule that nobody has consumed frees its tensor when it dies, so
a reader only has to hold it; and an exporter lets NumPy or CuPy make a capsule of unsigned integers (their code then
owns the memory's life) and puts the true element type into it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ArgumentError, DeviceError, DTypeError
from ..vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, I32, I64, DType
from .types import refuse_type
from .view import Device, contiguous_strides

__all__ = ["Exported", "Imported", "device_of", "read"]

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_E4M3FN, _E5M2 = 10, 12
_CODES: dict[DType, tuple[int, int]] = {
    F32: (_FLOAT, 32), F16: (_FLOAT, 16), BF16: (_BFLOAT, 16), E4M3: (_E4M3FN, 8), E5M2: (_E5M2, 8),
    I32: (_INT, 32), I64: (_INT, 64),
}  # fmt: skip
_TYPES = {code: dtype for dtype, code in _CODES.items()}
_NAMES = {
    _INT: "int", _UINT: "uint", _FLOAT: "float", _COMPLEX: "complex", _BOOL: "bool", 7: "float8_e3m4", 8: "float8_e4m3",
    9: "float8_e4m3b11fnuz", 11: "float8_e4m3fnuz", 13: "float8_e5m2fnuz", 14: "float8_e8m0fnu", 15: "float6_e2m3fn",
    16: "float6_e3m2fn", 17: "float4_e2m1fn",
}  # fmt: skip
# kDLCPU and the page-locked host memory of CUDA and ROCm; kDLCUDA and managed memory; kDLROCM.
_DEVICES = {1: "cpu", 3: "cpu", 11: "cpu", 2: "cuda", 13: "cuda", 10: "rocm"}
_READ_ONLY, _COPIED = 1, 2


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; the older DLManagedTensor begins with its tensor."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Imported(NamedTuple):
    """What a capsule says. `owner` is the capsule, which keeps the memory alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    readonly: bool
    copied: bool
    owner: Any


def _tensor(capsule: Any, argument: str) -> tuple[_Tensor, int]:
    """The tensor inside a capsule, and its flags."""
    if _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_get_pointer(capsule, b"dltensor")), 0
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise DTypeError(
                f"{argument} exports DLPack {managed.major}.{managed.minor}; detkern reads versions below 2"
            )
        return managed.tensor, managed.flags
    raise DTypeError(f"{argument}.__dlpack__() gave no DLPack capsule")


def _device(code: int, index: int, argument: str) -> Device:
    """The device that a DLPack type and ordinal name."""
    kind = _DEVICES.get(code)
    if kind is None:
        raise DeviceError(f"{argument} is on a device of DLPack type {code}; detkern reads CPU, CUDA and ROCm memory")
    return Device(kind, 0 if kind == "cpu" else index)


def device_of(array: Any, argument: str) -> Device:
    """The device that the array's `__dlpack_device__` names; DeviceError where it names none."""
    try:
        code, index = array.__dlpack_device__()
        code, index = int(code), int(index)
    except Exception as error:  # the array's own code, which may raise anything
        raise DeviceError(f"{argument}.__dlpack_device__() names no device: {_said(error)}") from error
    return _device(code, index, argument)


def _said(error: Exception) -> str:
    """What an error of somebody else's code says, which may be nothing."""
    return str(error) or type(error).__name__


def read(array: Any, argument: str, cast: str, **keywords: Any) -> Imported:
    """The memory of an array with `__dlpack__`, which is called with `keywords` (a stream, on a device).

    DTypeError for element types without arithmetic here (`cast` is what the caller would write) and for an array that
    will not be exported.
    """
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 1), **keywords)
        except TypeError:  # written before the keyword existed
            capsule = array.__dlpack__(**keywords)
    except MemoryError:
        raise
    except Exception as error:  # the array's own code, which may raise anything
        raise DTypeError(f"{argument} will not be exported through DLPack: {_said(error)}") from error
    tensor, flags = _tensor(capsule, argument)
    kind = tensor.dtype
    dtype = _TYPES.get((kind.code, kind.bits))
    if dtype is None or kind.lanes != 1:
        name = _NAMES.get(kind.code, f"DLPack type {kind.code}")
        found = f"{name}{kind.bits}" if kind.code in (_INT, _UINT, _FLOAT, _COMPLEX) else name
        raise refuse_type(argument, found if kind.lanes == 1 else f"{found} in vectors of {kind.lanes}", cast)
    rank = tensor.ndim
    if rank < 0 or (rank > 0 and not tensor.shape):
        raise ArgumentError(f"{argument} exports a DLPack tensor of {rank} dimensions without their sizes")
    shape = tuple(tensor.shape[:rank]) if rank else ()
    if any(size < 0 for size in shape):
        raise ArgumentError(f"{argument} exports a DLPack tensor with a negative size, {list(shape)}")
    if not tensor.data and 0 not in shape:
        raise ArgumentError(f"{argument} exports a DLPack tensor {list(shape)} without memory (a null pointer)")
    strides = tuple(tensor.strides[:rank]) if rank and tensor.strides else contiguous_strides(shape)
    return Imported(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        _device(tensor.device_type, tensor.device_id, argument),
        bool(flags & _READ_ONLY),
        bool(flags & _COPIED),
        capsule,
    )


class Exported:
    """An array of unsigned integers, of NumPy or CuPy, that other frameworks import as one of `dtype`.

    `make` calls the array's own `__dlpack__` (on the right device and stream, where there is one).
    """

    def __init__(self, array: Any, dtype: DType, make: Callable[..., Any]) -> None:
        self._array = array
        self._dtype = dtype
        self._make = make

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self._make(**keywords)
        tensor, _ = _tensor(capsule, "the result")
        tensor.dtype.code, tensor.dtype.bits = _CODES[self._dtype]
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device
