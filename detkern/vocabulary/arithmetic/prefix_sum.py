"""Exact prefix sums of binary32 numbers, each rounded once: integers in units of 2^-149, in digits of 32 bits."""

from __future__ import annotations

import numpy as np

from .binary32 import Array, Binary32, canonical

__all__ = ["prefix_sums"]

_DIGITS = 10  # 320 bits: 277 of a finite number, 42 of their count, one of the sign
_DIGIT = np.int64(0xFFFFFFFF)
_COLUMNS = 1 << 15  # worked on at a time


def prefix_sums(terms: Binary32) -> Binary32:
    """out[:, j] = terms[:, 0] + ... + terms[:, j], exactly, rounded once to nearest even. NaN from a NaN on and from
    where both infinities have been; else infinite from an infinity on.

    terms: [M, N]; N at most 2^31.
    """
    out = np.empty_like(terms)
    carried = np.zeros((_DIGITS, terms.shape[0], 1), np.int64)
    with np.errstate(invalid="ignore"):
        for first in range(0, terms.shape[1], _COLUMNS):
            piece = terms[:, first : first + _COLUMNS]
            digits = _digits(np.where(np.isfinite(piece), piece, np.float32(0)))
            np.cumsum(digits, axis=2, out=digits)
            digits += carried
            _carry(digits)
            carried = digits[:, :, -1:].copy()
            out[:, first : first + _COLUMNS] = _rounded(digits)
        # An infinity less itself is NaN, and 0 where all are finite.
        special = np.cumsum(np.where(np.isfinite(terms), np.float32(0), terms), axis=1, dtype=np.float32)
    return canonical(np.where(special == 0, out, special))


def _digits(terms: Binary32) -> Array:
    """[_DIGITS, M, N], each term in two neighbouring digits; the upper one has the sign of a negative number."""
    bits = terms.view(np.int32).astype(np.int64)
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    magnitude = np.where(exponent > 0, fraction | 0x800000, fraction)
    places = np.maximum(exponent, 1) - 1  # above 2^-149
    wide = np.where(bits < 0, -magnitude, magnitude) << (places & 31)
    digits = np.zeros((_DIGITS, *terms.shape), np.int64)
    lower = (places >> 5)[None]
    np.put_along_axis(digits, lower, (wide & _DIGIT)[None], 0)
    np.put_along_axis(digits, lower + 1, (wide >> 32)[None], 0)
    return digits


def _carry(digits: Array) -> None:
    """Digits from 0 on below 2^32, but the highest, which keeps the sign."""
    for at in range(_DIGITS - 1):
        digits[at + 1] += digits[at] >> 32
        digits[at] &= _DIGIT


def _rounded(digits: Array) -> Binary32:
    """Each number in digits with their carries, rounded once: what is below 2^-126 is a multiple of 2^-149 and has no
    more than 23 bits."""
    negative = digits[-1] < 0
    digits = np.where(negative, -digits, digits)
    _carry(digits)
    top = np.maximum(_DIGITS - 1 - np.argmax(digits[::-1] != 0, axis=0), 1)  # of small numbers 1 too
    lower = np.arange(_DIGITS)[:, None, None] < top - 1
    # The two highest digits; the last bit also says whether anything was left below, which is far below the 24 bits
    # that are kept.
    high, low = (np.take_along_axis(digits, (top - i)[None], 0)[0].astype(np.uint64) for i in (0, 1))
    number = high << np.uint64(32) | low | ((digits != 0) & lower).any(axis=0).astype(np.uint64)
    significand = number.astype(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        magnitude = np.ldexp(significand, 32 * (top - 1) - 149).astype(np.float32)
    result: Binary32 = np.where(negative, -magnitude, magnitude)
    return result
