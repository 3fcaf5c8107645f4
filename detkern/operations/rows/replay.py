"""The row operations in NumPy: the definition one can run, and what the CPU backend falls back to without a C++
compiler.

Written to be read beside docs/contracts.md. NumPy works on all rows of a piece at once. As for gemm/replay.py, the
thread must be in the default rounding and flush-to-zero modes.
"""

from __future__ import annotations

import numpy as np

from ...errors import ContractUnsupported, ShapeError
from ...vocabulary.arithmetic.binary32 import Array, Binary32, add, canonical, fma, round_to
from ...vocabulary.arithmetic.prefix_sum import prefix_sums
from ...vocabulary.dtypes import BF16, F16, F32, DType, from_numpy
from .problem import RowKind

__all__ = ["aligned_sum", "exponential", "logarithm", "rows"]

_PIECE = 1 << 18  # elements worked on at a time
FRACTION_BITS = 43  # of a sum's largest term
_IN_64_BITS = 1 << 18  # terms below 2^44 whose sum is below 2^62

LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))
LN2_HIGH = np.float32(float.fromhex("0x1.62e4p-1"))
LN2_LOW = np.float32(float.fromhex("0x1.7f7d1cp-20"))
ROUNDER = np.float32(1.5 * 2**23)
LOWEST, HIGHEST = np.float32(-104), np.float32(89)
# From the highest power down.
EXP_COEFFICIENTS = [
    np.float32(float.fromhex(text))
    for text in (
        "0x1.6a23f6p-10", "0x1.123a0ap-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "0x1p+0", "0x1p+0",
    )
]  # fmt: skip
LOG_COEFFICIENTS = [
    np.float32(float.fromhex(text))
    for text in (
        "-0x1.0931e8p-3", "0x1.1ed08ep-3", "-0x1.f25dd8p-4", "0x1.1ebe90p-3", "-0x1.55a754p-3", "0x1.99d1f0p-3",
        "-0x1.fffe84p-3", "0x1.555502p-2", "-0x1p-1",
    )
]  # fmt: skip
LOG_FIRST = np.int32(0x3F2AAAAB)  # 2/3


def _horner(coefficients: list[np.float32], x: Binary32) -> Binary32:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = fma(value, x, np.full_like(x, coefficient))
    return value


def _power_of_two(exponent: Array) -> Binary32:
    powers: Binary32 = ((exponent + 127) << 23).astype(np.int32).view(np.float32)
    return powers


def exponential(x: Binary32) -> Binary32:
    """exp(x) by the written-out polynomial."""
    nan = np.isnan(x)
    clamped = np.where(nan, np.float32(0), np.minimum(np.maximum(x, LOWEST), HIGHEST)).astype(np.float32)
    shifted = fma(clamped, np.full_like(clamped, LOG2_E), np.full_like(clamped, ROUNDER))
    integer = shifted - ROUNDER
    r = fma(integer, np.full_like(clamped, -LN2_HIGH), clamped)
    r = fma(integer, np.full_like(clamped, -LN2_LOW), r)
    mantissa = _horner(EXP_COEFFICIENTS, r)
    exponent = integer.astype(np.int32)
    half = exponent >> 1
    with np.errstate(over="ignore", under="ignore"):
        value = (mantissa * _power_of_two(half)) * _power_of_two(exponent - half)
    return canonical(np.where(nan, np.float32(np.nan), value))


def logarithm(s: Binary32) -> Binary32:
    """log(s) of numbers from 1 to below infinity, and of NaN, by the written-out polynomial."""
    nan = np.isnan(s)
    bits = np.where(nan, np.float32(1), s).astype(np.float32).view(np.int32)
    exponent = (bits - LOG_FIRST) >> 23
    f = (bits - (exponent << 23)).view(np.float32) - np.float32(1)
    value = fma(f * f, _horner(LOG_COEFFICIENTS, f), f)
    k = exponent.astype(np.float32)
    value = fma(k, np.full_like(k, LN2_LOW), value)
    value = fma(k, np.full_like(k, LN2_HIGH), value)
    return canonical(np.where(nan, np.float32(np.nan), value))


def rows(
    kind: RowKind, a: Array, b: Array | None = None, *, width: int | None = None, out_dtype: DType | None = None
) -> Array:
    """The row operation on two-dimensional operands, as a new array of `out_dtype`: [M] where it reduces, else [M, N].

    a:     [M, N], or [M] where the kind spreads one number over a row.
    b:     [M, N] where the kind has two operands, of any of the three types.
    width: N of a kind that spreads a alone.

    Raises ContractUnsupported or ShapeError.
    """
    for operand in (a,) if b is None else (a, b):
        if from_numpy(operand.dtype) not in (F32, F16, BF16):
            raise ContractUnsupported(f"row operations do not take {operand.dtype}")
    if (b is None) != (kind.operands == 1) or a.ndim != (1 if kind.spreads else 2):
        raise ShapeError(f"{kind.label} does not take operands with these dimensions")
    if out_dtype is None:
        out_dtype = from_numpy(a.dtype if b is None else b.dtype)
    assert out_dtype is not None
    columns = b.shape[1] if b is not None else a.shape[1] if a.ndim == 2 else width
    if columns is None:
        raise ShapeError(f"{kind.label} needs a width")
    out = np.empty((a.shape[0],) if kind.reduces else (a.shape[0], columns), out_dtype.numpy)
    height = max(_PIECE // max(columns, 1), 1)
    with np.errstate(all="ignore"):
        for first in range(0, a.shape[0], height):
            piece = slice(first, first + height)
            result = _piece(
                kind, a[piece].astype(np.float32), None if b is None else b[piece].astype(np.float32), columns
            )
            out[piece] = round_to(add(result, np.zeros_like(result)), out_dtype)
    return out


def _piece(kind: RowKind, a: Binary32, b: Binary32 | None, columns: int) -> Binary32:
    """The operation on binary32 rows, before + 0 and the last rounding."""
    width = np.float32(columns)
    if kind == RowKind.SUM:
        return aligned_sum(a)
    if kind == RowKind.MEAN:
        return _quotient(aligned_sum(a), width)
    if kind == RowKind.MEAN_SQUARE:
        return _quotient(aligned_sum(a * a), width)
    if kind in (RowKind.SOFTMAX, RowKind.LOG_SOFTMAX):
        if columns == 0:
            return a
        distance = a - a.max(axis=1, keepdims=True)  # NaN where one of the row is
        e = exponential(distance)
        s = aligned_sum(e)[:, None]
        return _quotient(e, s) if kind == RowKind.SOFTMAX else distance - logarithm(s)
    if kind == RowKind.SUM_BACKWARD:
        return np.repeat(a[:, None], columns, axis=1)
    if kind == RowKind.MEAN_BACKWARD:
        return np.repeat(_quotient(a, width)[:, None], columns, axis=1)
    if kind == RowKind.CUMSUM:
        return prefix_sums(a)
    if kind == RowKind.CUMSUM_BACKWARD:
        return prefix_sums(a[:, ::-1])[:, ::-1]
    assert b is not None
    if kind == RowKind.MEAN_SQUARE_BACKWARD:
        each = _quotient(a, width)
        return (each + each)[:, None] * b
    if kind == RowKind.SOFTMAX_BACKWARD:
        return b * (a - aligned_sum(b * a)[:, None])
    e = exponential(b)
    return fma(-e, np.broadcast_to(aligned_sum(a)[:, None], e.shape), a)


def _quotient(x: Binary32, y: Array | np.float32) -> Binary32:
    return canonical(np.asarray(np.divide(x, y, dtype=np.float32)))


def aligned_sum(terms: Binary32) -> Binary32:
    """The sum of each row: terms truncated to multiples of 2^(E - 43), added exactly, rounded once. The order cannot
    matter."""
    largest = np.abs(terms).max(axis=1, initial=np.float32(0))  # NaN where one is
    finite = np.isfinite(largest)
    exponent = np.maximum(np.frexp(np.where(finite, largest, np.float32(0)))[1] - 1, -126)
    unit = (exponent - FRACTION_BITS)[:, None]
    wide = np.where(finite[:, None], terms, np.float32(0)).astype(np.float64)
    integers = np.trunc(np.ldexp(wide, -unit)).astype(np.int64)  # ldexp is exact: double has the range
    total = _rounded_total(integers, unit[:, 0])
    special = np.where(np.isfinite(terms), np.float32(0), terms).sum(axis=1, dtype=np.float32)
    return canonical(np.where(finite, total, special))


def _rounded_total(integers: Array, unit: Array) -> Binary32:
    """The sum of each row of integers below 2^44, times 2^unit, rounded once to binary32."""
    shift = np.zeros_like(unit)
    if integers.shape[1] <= _IN_64_BITS:
        total = integers.sum(axis=1)
    else:
        parts = np.add.reduceat(integers, np.arange(0, integers.shape[1], _IN_64_BITS), axis=1)
        whole = [sum(map(int, row)) for row in parts]
        shift = np.array([max(abs(number).bit_length() - 62, 0) for number in whole], shift.dtype)
        total = np.array([_shortened(number, int(by)) for number, by in zip(whole, shift, strict=True)], np.int64)
    # The one rounding: a sum below 2^-126 is a multiple of 2^-149 and has no more than 23 bits.
    significand = total.astype(np.float32).astype(np.float64)
    result: Binary32 = np.ldexp(significand, unit + shift).astype(np.float32)
    return result


def _shortened(number: int, by: int) -> int:
    """number / 2^by of which the last bit also says whether anything was left:
    it rounds to 24 bits as `number` does."""
    magnitude = abs(number) >> by | bool(abs(number) & ((1 << by) - 1))
    return magnitude if number >= 0 else -magnitude
