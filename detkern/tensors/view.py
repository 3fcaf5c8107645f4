"""A device, and a typed window on memory: what every adapter makes of an array and every backend reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..dtypes import DType

__all__ = ["Device", "TensorView", "contiguous_strides", "describe"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lives. kind: "cpu", "cuda", "rocm", "musa" or "ascend"; index: the ordinal of that kind (0 for
    "cpu")."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


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
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe(view: TensorView) -> str:
    """A view as messages name it: "float32 [4, 8]"."""
    return f"{view.dtype} {list(view.shape)}"
