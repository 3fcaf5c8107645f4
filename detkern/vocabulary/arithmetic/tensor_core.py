"""One step of a tensor core, acc + a[k] * b[k] + ..., in integers: the numbered rules of docs/contracts.md, a function
each.

A finite number is held as significand * 2^(exponent - stored bits), the significand a signed integer. All terms of a
step are brought to multiples of 2^(E - F), E the largest exponent, so the sum of a step is one 64-bit integer (of 33
bits at most).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..contracts import TensorCoreStep
from ..dtypes import DType, from_numpy
from .binary32 import Array, Binary32, canonical

__all__ = ["tensor_core_step"]

Integers = npt.NDArray[np.int64]

NO_EXPONENT = -(1 << 20)  # below every exponent: what a zero term has


def stored_bits(values: Array) -> int:
    """Bits of the significand after the leading one."""
    info: Any = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
    return int(info.nmant)


def unpack(values: Array) -> tuple[Integers, Integers]:
    """Rule 1: the signed significands and the exponents of `values`; infinities and NaN come out as zeros.

    A subnormal number has the exponent of the smallest normal one and its significand is not normalised.
    """
    dtype = from_numpy(values.dtype)
    assert isinstance(dtype, DType)
    stored = stored_bits(values)
    info: Any = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
    smallest = int(info.minexp)
    bits = values.view(dtype.bits).astype(np.int64)
    sign = bits >> (8 * dtype.itemsize - 1)
    field = (bits >> stored) & ((1 << (8 * dtype.itemsize - 1 - stored)) - 1)
    magnitude = (bits & ((1 << stored) - 1)) + np.where(field > 0, 1 << stored, 0)
    magnitude = np.where(np.isfinite(values), magnitude, 0)
    return np.where(sign == 1, -magnitude, magnitude), np.maximum(field, 1) - 1 + smallest


def term_exponent(significand: Integers, exponent: Integers) -> Integers:
    """Rule 2: a zero term has no exponent, whatever its factors were."""
    return np.where(significand == 0, NO_EXPONENT, exponent)


def truncate(significand: Integers, distance: Any) -> Integers:
    """Rule 3: significand / 2^distance truncated toward zero, sign and magnitude; distance is not negative."""
    magnitude: Integers = np.abs(significand) >> np.minimum(distance, 63)
    return np.where(significand < 0, -magnitude, magnitude)


def fixed_point(significand: Integers, stored: int, fraction_bits: int) -> Integers:
    """Significands of `stored` fraction bits with `fraction_bits` of them instead; fewer truncate as rule 3 would,
    which drops those bits of the term with the largest exponent in any case."""
    if stored <= fraction_bits:
        return significand << (fraction_bits - stored)
    return truncate(significand, stored - fraction_bits)


def keep_bits(total: Integers, unit: Integers, significant_bits: int) -> Integers:
    """Rule 4: total * 2^unit truncated toward zero to `significant_bits` bits and to a multiple of 2^-149; as a
    multiple of 2^unit again."""
    length = np.frexp(np.abs(total).astype(np.float64))[1]
    drop: Integers = np.maximum(np.maximum(length - significant_bits, -149 - unit), 0)
    return truncate(total, drop) << drop


def to_binary32(total: Integers, unit: Integers) -> Binary32:
    """Rules 4 and 5: total * 2^unit, which has at most 24 bits, in binary32: 2^128 and more is infinity, zero is +0."""
    # binary64 holds the value exactly, and the cast rounds nothing but overflow: it takes 2^128 and more to infinity.
    return np.ldexp(total.astype(np.float64), unit).astype(np.float32)


def nonfinite_sum(acc: Binary32, a: Array, b: Array) -> Binary32:
    """Rule 5: the sum of the terms that are infinite or NaN, 0 where there is none.

    This is IEEE addition: NaN if an operand is NaN, a product is inf * 0, or infinities of both signs occur; else the
    infinity. The binary64 products of finite operands do not overflow.
    """
    products = a.T.astype(np.float64)[:, :, None] * b.astype(np.float64)[:, None, :]
    special = np.where(np.isfinite(products), 0.0, products).sum(axis=0)
    return canonical((special + np.where(np.isfinite(acc), np.float32(0), acc)).astype(np.float32))


def tensor_core_step(step: TensorCoreStep, acc: Binary32, a: Array, b: Array) -> Binary32:
    """acc [rows, cols] in binary32 plus the products of a [rows, group] and b [group, cols]; a new array.

    A group shorter than the step's is one padded with zeros: those are terms without an exponent.
    """
    a_significand, a_exponent = unpack(a)
    b_significand, b_exponent = unpack(b)
    products = a_significand.T[:, :, None] * b_significand[:, None, :]
    exponents = term_exponent(products, a_exponent.T[:, :, None] + b_exponent[:, None, :])
    addend, addend_exponent = unpack(acc)
    addend_exponent = term_exponent(addend, addend_exponent)

    largest = np.maximum(np.maximum(exponents.max(axis=0, initial=NO_EXPONENT), addend_exponent), step.floor)
    unit = largest - step.fraction_bits
    total = truncate(fixed_point(addend, stored_bits(acc), step.fraction_bits), largest - addend_exponent)
    products = fixed_point(products, stored_bits(a) + stored_bits(b), step.fraction_bits)
    total += truncate(products, largest - exponents).sum(axis=0)
    result = to_binary32(keep_bits(total, unit, step.significant_bits), unit)

    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(acc).all()):
        special = nonfinite_sum(acc, a, b)
        result = np.where(np.isfinite(special), result, special)
    return result
