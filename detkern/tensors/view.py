"""A device, and a typed window on memory: what every adapter makes of an array and every backend reads."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from ..vocabulary.dtypes import DType

__all__ = ["Device", "TensorView", "contiguous_strides", "describe", "device_of", "element_strides"]

_KINDS = ("cpu", "cuda", "rocm", "musa", "ascend")


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lives. kind: "cpu", "cuda", "rocm", "musa" or "ascend"; index: the ordinal of that kind (0 for
    "cpu")."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def device_of(value: Any) -> Device:
    """The device that a caller names: the ordinal of a CUDA device, or a name such as "cuda:0", "rocm:0" or "cpu";
    anything whose str() is such a name, as torch.device.

    Raises ArgumentError for anything else.
    """
    try:
        kind, ordinal = "cuda", "none" if isinstance(value, bool) else str(operator.index(value))
    except TypeError:
        kind, _, ordinal = str(value).partition(":")
    if kind not in _KINDS or not (ordinal.isdecimal() or ordinal == "") or (kind == "cpu" and ordinal not in ("", "0")):
        raise ArgumentError(
            f"device={value!r} is not a device; give the ordinal of a CUDA device, or a name such as cuda:0, rocm:0 or "
            f"cpu"
        )
    return Device(kind, int(ordinal or 0))


# Not frozen: three are made in each call, and a frozen dataclass costs four times as much to make.
@dataclass(slots=True)
class TensorView:
    """A typed, strided window on memory that somebody else owns. Nobody changes one after it is made.

    pointer: the address of element [0, …, 0]; strides: in elements, any sign, zero where broadcast.
    array:   the caller's array, or whatever else keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    readonly: bool = False
    array: Any = field(default=None, compare=False, repr=False)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major array of `shape`."""
    rank = len(shape)
    if rank == 2:  # what most results are
        return shape[1] or 1, 1
    if rank == 3:
        return (shape[1] or 1) * (shape[2] or 1), shape[2] or 1, 1
    if rank == 1:
        return (1,)
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def element_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Strides of bytes in elements, or None where one is not a multiple of the element's size.

    The stride of a dimension of size one, and every stride of an empty array, is never used and may be anything: it
    becomes 0 where it is not a multiple.
    """
    if itemsize == 1:
        return strides
    if any(step % itemsize for step in strides):
        if 0 not in shape and any(n > 1 and step % itemsize for n, step in zip(shape, strides, strict=True)):
            return None
        strides = tuple(0 if step % itemsize else step for step in strides)
    return tuple([step // itemsize for step in strides])


def describe(view: TensorView) -> str:
    """A view as messages name it: "float32 [4, 8]"."""
    return f"{view.dtype} {list(view.shape)}"
