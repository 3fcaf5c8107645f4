"""The binary32 operations of the contracts on NumPy arrays, each rounded once to nearest even, subnormals kept.

NumPy computes in whatever rounding and flush-to-zero mode the calling thread is in. These functions are right in the
default modes only; who calls them from a thread that may be in others sets the modes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import BF16, F16, F32, DType

__all__ = ["Binary32", "add", "canonical", "fma", "round_to"]

Array = npt.NDArray[Any]
Binary32 = npt.NDArray[np.float32]

_NAN = {F32: 0x7FFFFFFF, F16: 0x7FFF, BF16: 0x7FFF}


def canonical(values: Array, dtype: DType = F32) -> Array:
    """`values` of `dtype` with every NaN replaced by the one NaN of that type, in place."""
    values.view(dtype.bits)[np.isnan(values)] = _NAN[dtype]
    return values


def round_to(values: Binary32, dtype: DType) -> Array:
    """binary32 values rounded to `dtype` (f32, f16 or bf16); a new array."""
    return canonical(values.astype(dtype.numpy), dtype)


def add(x: Binary32, y: Binary32) -> Binary32:
    """x + y in binary32."""
    return canonical(np.add(x, y, dtype=np.float32))


def fma(a: Array, b: Array, c: Binary32) -> Binary32:
    """a * b + c rounded once to binary32; a and b both binary32, or both of 16 bits or fewer.

    The binary64 product of two binary32 numbers is exact. So is the one of 16-bit numbers, and then its binary64 sum
    with a binary32 number, rounded once more to binary32, is the sum rounded once: the first rounding only happens
    where one addend lies so far below the other that no binary32 midpoint is near. With 24-bit factors there may be
    one, so the first rounding is to odd, which the second never mistakes (S. Boldo and G. Melquiond, "Emulation of FMA
    and correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers, 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    if a.dtype == np.float32:
        total = _round_to_odd(product, addend, total)
    return canonical(total.astype(np.float32))


def _round_to_odd(x: Array, y: Array, total: Array) -> Array:
    """x + y in binary64 rounded to odd, given `total`, the sum rounded to nearest."""
    # The error of the sum, exactly (D. Knuth's two-sum).
    virtual = total - x
    error = (x - (total - virtual)) + (y - virtual)
    bits = total.view(np.int64)
    inexact_even = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    # The exact sum lies beyond an even `total`, or before it: the odd neighbour on that side is the result.
    return np.where(inexact_even, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)
