"""Results compared as integers."""

from __future__ import annotations

import numpy as np


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Equal type, shape and bit patterns; the message counts the differing elements and shows the first."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    x, y = np.ascontiguousarray(actual).view(bits), np.ascontiguousarray(expected).view(bits)
    if not np.array_equal(x, y):
        different = np.argwhere(x != y)
        at = tuple(int(i) for i in different[0])
        shown = f"{x[at]:#x} ({actual[at]}) instead of {y[at]:#x} ({expected[at]})"
        raise AssertionError(f"{what}: {len(different)} of {x.size} elements differ; at {at} {shown}")
