"""Floating-point operations in exact rational arithmetic, each rounded once to nearest even. Scalars, slow, plain.

A number is a Python float, which holds every binary32 and 16-bit number, signed zeros, infinities and NaN exactly.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from detkern.vocabulary.dtypes import BF16, F16, F32, DType

# Significand bits, smallest and largest exponent of a normal number.
_FORMATS = {F32: (24, -126, 127), F16: (11, -14, 15), BF16: (8, -126, 127)}


def round_fraction(value: Fraction, dtype: DType) -> float:
    """A non-zero `value` rounded to `dtype`; what rounds to zero keeps its sign."""
    bits, smallest, largest = _FORMATS[dtype]
    sign = -1.0 if value < 0 else 1.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    count = round(magnitude / unit)  # Fraction rounds to nearest, ties to even
    if count * unit >= Fraction(2) ** (largest + 1):
        return sign * math.inf
    return sign * float(count * unit)


def fma(a: float, b: float, c: float) -> float:
    """a * b + c rounded once to binary32."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        if math.isnan(a) or math.isnan(b) or math.isnan(c):
            return math.nan
        if math.isfinite(a) and math.isfinite(b):
            return c
        if a == 0 or b == 0:
            return math.nan
        product = math.copysign(math.inf, math.copysign(1, a) * math.copysign(1, b))
        return math.nan if c == -product else product
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact != 0:
        return round_fraction(exact, F32)
    # A zero sum is -0 where both addends are -0, else +0.
    negative_product = math.copysign(1, a) * math.copysign(1, b) < 0
    both_negative = negative_product and math.copysign(1, c) < 0 and a * b == 0 and c == 0
    return -0.0 if both_negative else 0.0


def add(x: float, y: float) -> float:
    """x + y rounded to binary32."""
    return fma(x, 1.0, y)


def round_to(value: float, dtype: DType) -> float:
    """`value` rounded to `dtype`."""
    if value == 0 or not math.isfinite(value):
        return value
    return round_fraction(Fraction(value), dtype)


def fma_chain(a: list[float], b: list[float], acc: float = 0.0) -> float:
    """The chain over k ascending."""
    for x, y in zip(a, b, strict=True):
        acc = fma(x, y, acc)
    return acc


def exact_sum(terms: list[float]) -> float:
    """The sum of binary32 numbers of any kind, rounded once to binary32."""
    infinite = {term for term in terms if math.isinf(term)}
    if any(math.isnan(term) for term in terms) or len(infinite) > 1:
        return math.nan
    if infinite:
        return infinite.pop()
    exact = sum(map(Fraction, terms), Fraction(0))
    return round_fraction(exact, F32) if exact else 0.0


def aligned_sum(terms: list[float]) -> float:
    """The sum of docs/contracts.md, "The aligned sum", of binary32 numbers of any kind."""
    infinite = {term for term in terms if math.isinf(term)}
    if any(math.isnan(term) for term in terms) or len(infinite) > 1:
        return math.nan
    if infinite:
        return infinite.pop()
    largest = max((abs(term) for term in terms), default=0.0)
    if largest == 0:
        return 0.0
    exponent = max(math.frexp(largest)[1] - 1, -126)
    unit = Fraction(2) ** (exponent - 43)
    total = unit * sum(math.trunc(Fraction(term) / unit) for term in terms)
    return round_fraction(total, F32) if total else 0.0


def floats(values: np.ndarray) -> list:
    """The elements of an array as nested lists of Python floats."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float64).tolist()


def encode(values: list, dtype: DType) -> np.ndarray:
    """Nested lists of floats that `dtype` holds exactly, as an array of it with the contracts' NaN."""
    wide = np.array(values, np.float64)
    with np.errstate(all="ignore"):
        array = wide.astype(dtype.numpy)
        assert np.array_equal(array.astype(np.float64), wide, equal_nan=True)
    array.view(dtype.bits)[np.isnan(wide)] = {F32: 0x7FFFFFFF}.get(dtype, 0x7FFF)
    return array
