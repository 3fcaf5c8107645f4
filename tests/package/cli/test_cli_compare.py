"""Bit comparison: counts, ULP distances and the first mismatch, against values worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from detkern.cli.compare import compare
from detkern.errors import DTypeError, ShapeError


def _f32(*patterns: int) -> np.ndarray:
    return np.array(patterns, np.uint32).view(np.float32)


def test_equal_bits_are_equal_even_where_they_are_nan() -> None:
    array = _f32(0x3F800000, 0x7FFFFFFF, 0x80000000)
    found = compare(array, array.copy())
    assert (found.elements, found.differing, found.largest_ulp, found.first) == (3, 0, None, None)


@pytest.mark.parametrize(
    ("got", "want", "apart"),
    [
        (0x3F800000, 0x3F800001, 1),
        (0x00000000, 0x80000000, 0),  # the zeros differ, no number lies between them
        (0x00000001, 0x80000001, 2),  # the smallest subnormals of either sign
        (0x7F7FFFFF, 0x7F800000, 1),  # the largest finite number and infinity
        (0xC0000000, 0x40000000, 0x80000000),
        (0xFF800000, 0x7F800000, 0xFF000000),
    ],
)
def test_ulp_distance(got: int, want: int, apart: int) -> None:
    for one, other in ((got, want), (want, got)):
        found = compare(_f32(one), _f32(other))
        assert (found.differing, found.largest_ulp, found.nan_against_number) == (1, apart, 0)


def test_nan_payloads_differ_and_count_apart_from_numbers() -> None:
    found = compare(_f32(0x7FFFFFFF, 0x7FFFFFFF, 0x3F800000), _f32(0x7FC00000, 0x3F800000, 0x3F800000))
    assert (found.differing, found.largest_ulp, found.nan_against_number, found.nan_patterns) == (2, None, 1, 1)
    assert found.largest_error is None
    assert found.first is not None
    assert found.first.index == (1,), "NaN against a number comes before NaN against NaN"
    found = compare(_f32(0x3F800000, 0x7FFFFFFF), _f32(0x3F800000, 0xFFC00000))
    assert (found.differing, found.nan_patterns, found.nan_against_number) == (1, 1, 0)
    assert found.first is not None
    assert found.first.index == (1,)


def test_absolute_error() -> None:
    """1 against 1 + 2^-23, -2 against 2; infinities have no finite distance."""
    assert compare(_f32(0x3F800000), _f32(0x3F800001)).largest_error == 2.0**-23
    assert compare(_f32(0xC0000000, 0x3F800000), _f32(0x40000000, 0x3F800001)).largest_error == 4.0
    assert compare(_f32(0x00000000), _f32(0x80000000)).largest_error == 0.0
    assert compare(_f32(0x7F7FFFFF), _f32(0x7F800000)).largest_error is None
    largest = np.array([np.finfo(np.float16).max], np.float16)
    assert compare(largest, -largest).largest_error == 131008.0


def test_first_mismatch_is_in_row_major_order_with_all_digits() -> None:
    want = np.zeros((2, 3), ml_dtypes.bfloat16)
    got = want.copy()
    got[1, 0] = 2
    got[0, 2] = 1
    first = compare(np.asfortranarray(got), want).first
    assert first is not None
    assert (first.index, first.got_bits, first.want_bits, first.got, first.want) == (
        (0, 2), "0x3f80", "0x0000", "1.0", "0.0",
    )  # fmt: skip


def test_other_shapes_and_types_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 1\) was computed, \(2,\) expected"):
        compare(np.zeros((2, 1), np.float32), np.zeros(2, np.float32))
    with pytest.raises(DTypeError, match="float16 was computed, float32 expected"):
        compare(np.zeros(2, np.float16), np.zeros(2, np.float32))
