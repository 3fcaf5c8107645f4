"""Element types: their names, sizes and the codes that cross the C ABI."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "BF16", "DTYPES", "E4M3", "E5M2", "F16", "F32", "I32", "I64", "INDICES", "DType", "by_name", "from_numpy",
]  # fmt: skip


@dataclass(frozen=True)
class DType:
    """One element type. `code` is the value of `detkern_dtype` in abi/abi.h;
    `short` the name in tables and messages."""

    name: str
    short: str
    code: int
    itemsize: int

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type, from ml_dtypes where NumPy has none."""
        return np.dtype(getattr(ml_dtypes, self.name, None) or self.name)

    @cached_property
    def bits(self) -> np.dtype[Any]:
        """The unsigned integer type of the same size, in which results are compared."""
        return np.dtype(f"u{self.itemsize}")

    def __hash__(self) -> int:
        return self.code

    def __str__(self) -> str:
        return self.name


F32 = DType("float32", "f32", 1, 4)
F16 = DType("float16", "f16", 2, 2)
BF16 = DType("bfloat16", "bf16", 3, 2)
E4M3 = DType("float8_e4m3fn", "e4m3", 4, 1)
E5M2 = DType("float8_e5m2", "e5m2", 5, 1)

DTYPES: tuple[DType, ...] = (F32, F16, BF16, E4M3, E5M2)

# What indices may be. Nothing is computed in these types, and their codes stay out of the ABI.
I32 = DType("int32", "i32", 64, 4)
I64 = DType("int64", "i64", 65, 8)
INDICES: tuple[DType, ...] = (I32, I64)

_BY_NAME = {name: dtype for dtype in DTYPES for name in (dtype.name, dtype.short)}
_NUMPY = {dtype.name: dtype for dtype in (*DTYPES, *INDICES)}


def by_name(name: str) -> DType | None:
    """The type of DTYPES called `name` ("bfloat16" or "bf16"), or None."""
    return _BY_NAME.get(name)


def from_numpy(dtype: np.dtype[Any]) -> DType | None:
    """The type of a native-endian NumPy dtype, or None where detkern has none for it."""
    return _NUMPY.get(dtype.name) if dtype.isnative else None
