"""Two arrays against each other, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError, ShapeError
from ..vocabulary.dtypes import DType, from_numpy

__all__ = ["Comparison", "Mismatch", "bits", "compare"]


@dataclass(frozen=True)
class Mismatch:
    """One element whose bits differ. The patterns are in hexadecimal, with all their digits."""

    index: tuple[int, ...]
    got_bits: str
    want_bits: str
    got: str
    want: str

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return f"[{at}]: {self.got_bits} ({self.got}) where {self.want_bits} ({self.want}) was expected"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    largest_ulp:   over differing elements that are numbers on both sides (+0 against -0 is 0 apart, an infinity one
                   step beyond the largest finite number); None where there are none.
    largest_error: the largest absolute difference over those that are finite on both sides; None where there are none.
    nan_against_number: differing elements of which exactly one side is NaN.
    nan_patterns:  differing elements that are NaN on both sides, with another sign or payload.
    first:         the first differing element in row-major order; one of `nan_patterns` only where all are.
    """

    elements: int
    differing: int
    largest_ulp: int | None = None
    largest_error: float | None = None
    nan_against_number: int = 0
    nan_patterns: int = 0
    first: Mismatch | None = None


def bits(array: npt.NDArray[Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The bit patterns of an array, as unsigned integers of the same size and shape."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}")).reshape(array.shape)


def _steps(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The place of each number among the numbers of its type: one apart means adjacent; both zeros are 0."""
    patterns = bits(array).astype(np.int64)
    sign = 1 << (8 * array.dtype.itemsize - 1)
    return np.where(patterns >= sign, sign - patterns, patterns)


def _text(value: Any) -> str:
    return repr(float(value))


def _hex(pattern: Any, dtype: DType) -> str:
    return f"0x{int(pattern):0{2 * dtype.itemsize}x}"


def compare(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> Comparison:
    """Compare two arrays of one shape and one of detkern's types as integers; ShapeError or DTypeError otherwise."""
    if got.shape != want.shape:
        raise ShapeError(f"the shapes differ: {got.shape} was computed, {want.shape} expected")
    dtype = from_numpy(got.dtype)
    if dtype is None or got.dtype != want.dtype:
        raise DTypeError(f"the types differ or are none of detkern's: {got.dtype} was computed, {want.dtype} expected")
    got_bits, want_bits = bits(got), bits(want)
    wrong = got_bits != want_bits
    differing = int(np.count_nonzero(wrong))
    if not differing:
        return Comparison(got.size, 0)
    nan_patterns = wrong & np.isnan(got) & np.isnan(want)
    same_values = int(np.count_nonzero(nan_patterns))
    shown = wrong if same_values == differing else wrong & ~nan_patterns
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(shown)), got.shape))
    first = Mismatch(
        index, _hex(got_bits[index], dtype), _hex(want_bits[index], dtype), _text(got[index]), _text(want[index])
    )
    ours, theirs = got[wrong], want[wrong]
    ours_nan, theirs_nan = np.isnan(ours), np.isnan(theirs)
    numbers = ~ours_nan & ~theirs_nan
    apart = np.abs(_steps(ours[numbers]) - _steps(theirs[numbers]))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    error = np.abs(ours[finite].astype(np.float64) - theirs[finite].astype(np.float64))
    return Comparison(
        elements=got.size,
        differing=differing,
        largest_ulp=int(apart.max()) if apart.size else None,
        largest_error=float(error.max()) if error.size else None,
        nan_against_number=int(np.count_nonzero(ours_nan != theirs_nan)),
        nan_patterns=same_values,
        first=first,
    )
