"""Any array in, a `TensorView` out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .dtypes import DType

__all__ = ["Device", "TensorView"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lives. kind: "cpu", "cuda", "rocm", "musa" or "ascend"; index: the ordinal of that kind (0 for "cpu")."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A typed, strided window on memory that somebody else owns.

    pointer: the address of element [0, …, 0]; strides: in elements, any sign, zero where broadcast.
    array:   the caller's array, which keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    readonly: bool = False
    array: Any = field(default=None, compare=False, repr=False)
