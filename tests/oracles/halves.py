"""Rows whose prefix sums lie half-way between two binary32 numbers, but for one bit far below."""

from __future__ import annotations

import numpy as np


def halves() -> np.ndarray:
    """[rows, 4] of 2^e, half of what its last place is worth, 2^low and -2^low: e in steps over all exponents, every
    third low down to -149."""
    rows = [
        (2.0**e, 2.0 ** (e - 24), 2.0**low, -(2.0**low)) for e in range(-100, 128, 9) for low in range(e - 25, -150, -3)
    ]
    return np.array(rows, np.float32)
