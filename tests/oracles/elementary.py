"""exp and log of docs/contracts.md in exact rational arithmetic, with the constants of that page, and what is made of
single roundings."""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np

from detkern.vocabulary.dtypes import F32

from . import rational

__all__ = ["exp", "horner", "log", "product", "quotient"]

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"


def _constants(name: str) -> list[float]:
    row = re.search(rf"^\| {name} \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None, name
    return [float.fromhex(text) for text in row[1].split(", ")]


LOG2_E, LN2_HIGH, LN2_LOW, ROUNDER = (_constants(name)[0] for name in ("LOG2_E", "LN2_HIGH", "LN2_LOW", "ROUNDER"))
EXP, LOG = _constants("E0 … E6"), _constants("L0 … L4") + _constants("L5 … L8")


def product(x: float, y: float) -> float:
    """x * y rounded once."""
    return rational.fma(x, y, -0.0)


def quotient(x: float, y: float) -> float:
    """x / y rounded once, y finite and not zero."""
    return x if x == 0 or not math.isfinite(x) else rational.round_fraction(Fraction(x) / Fraction(y), F32)


def horner(coefficients: list[float], x: float) -> float:
    """The polynomial by fused multiply-adds, from the highest power down."""
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = rational.fma(value, x, coefficient)
    return value


@functools.cache
def exp(x: float) -> float:
    """exp of any binary32 number."""
    if math.isnan(x):
        return x
    c = min(max(x, -104.0), 89.0)
    n = rational.add(rational.fma(c, LOG2_E, ROUNDER), -ROUNDER)
    assert n == int(n)
    r = rational.fma(n, -LN2_LOW, rational.fma(n, -LN2_HIGH, c))
    return rational.round_fraction(Fraction(horner(EXP, r)) * Fraction(2) ** int(n), F32)


def log(s: float) -> float:
    """log of a number from 1 to below infinity."""
    k = (int(np.float32(s).view(np.uint32)) - 0x3F2AAAAB) >> 23
    f = rational.add(float(Fraction(s) / Fraction(2) ** k), -1.0)
    v = rational.fma(product(f, f), horner(LOG, f), f)
    return rational.fma(float(k), LN2_HIGH, rational.fma(float(k), LN2_LOW, v))
