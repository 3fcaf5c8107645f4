"""Operands for one tensor-core chain that reach its corners; random data alone misses wrong rules.

Each case is a name, a [M, K], b [K, N] and a binary32 accumulator [M, N] to start from, or None for +0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from detkern.vocabulary.dtypes import F32, DType
from detkern.vocabulary.operands import generate


class Case(NamedTuple):
    name: str
    a: np.ndarray
    b: np.ndarray
    initial: np.ndarray | None


# The kinds of detkern.vocabulary.operands for a, b and the accumulator.
_KINDS = {
    "normal": ("normal", "normal", "normal"),
    "wide": ("wide", "wide", "wide"),
    "cancel": ("cancel", "cancel", "cancel"),
    "sparse": ("sparse", "sparse", "signed-zero"),
    "subnormal": ("subnormal", "subnormal", "subnormal"),
    "subnormal operands, subnormal accumulator": ("subnormal", "signed-zero", "subnormal"),
    "overflow": ("large", "large", "large"),
    "large zero products and tiny ones": ("large", "signed-zero", "subnormal"),
    "infinities and NaN": ("special", "special", "special"),
    "infinities, zeros and overflow": ("special", "large", "special"),
    "signed zeros": ("signed-zero", "signed-zero", "signed-zero"),
    "raw bits": ("bits", "bits", "bits"),
}


def _patterns(dtype: DType, shape: tuple[int, int], seed: int, low: Any, high: Any, full: bool = False) -> np.ndarray:
    """Numbers with exponents from low to high (which broadcast over `shape`), one below the smallest normal exponent
    meaning subnormal ones and zeros; `full`: positive with a significand of ones but for its last two bits."""
    info = ml_dtypes.finfo(dtype.numpy)
    words = generate("bits", F32, shape, seed).view(np.uint32).astype(np.int64)
    stored = words & ((1 << info.nmant) - 1)
    if full:
        stored |= (1 << info.nmant) - 1 & ~3
    low, high = (np.clip(exponent, info.minexp - 1, info.maxexp - 1) + 1 - info.minexp for exponent in (low, high))
    field = low + (words >> 23 & 0xFF) % (high - low + 1)
    sign = 0 if full else words >> 31
    return (sign << 8 * dtype.itemsize - 1 | field << info.nmant | stored).astype(dtype.bits).view(dtype.numpy)


Made = tuple[np.ndarray, np.ndarray, np.ndarray]


def _full(a: DType, b: DType, m: int, n: int, k: int, seed: int) -> Made:
    """Sums of 33 bits with their sign: every term near its largest for one exponent."""
    initial = _patterns(F32, (m, n), seed + 2, 0, 0, full=True)
    return _patterns(a, (m, k), seed, 0, 0, full=True), _patterns(b, (k, n), seed + 1, 0, 0, full=True), initial


def _edge(a: DType, b: DType, m: int, n: int, k: int, seed: int) -> Made:
    """Sums about 2^128 where products reach it, else accumulators about it."""
    initial = _patterns(F32, (m, n), seed + 2, 124, 127)
    return _patterns(a, (m, k), seed, 61, 64), _patterns(b, (k, n), seed + 1, 61, 64), initial


def _tiny(a: DType, b: DType, m: int, n: int, k: int, seed: int) -> Made:
    """Products from far below the floor to above it where the type reaches there, all terms of a sum about as large."""
    rows, cols = np.arange(m)[:, None] % 16 - 78, np.arange(n)[None] % 16 - 78
    x, y = _patterns(a, (m, k), seed, rows, rows + 2), _patterns(b, (k, n), seed + 1, cols, cols + 2)
    x[::2], y[:, ::2] = np.abs(x[::2]), np.abs(y[:, ::2])  # truncations that add up
    initial = _patterns(F32, (m, n), seed + 2, -127, -126)
    initial[::3] *= np.float32(0)
    return x, y, initial


def _subnormal_operands(a: DType, b: DType, m: int, n: int, k: int, seed: int) -> Made:
    """Every number of a subnormal, those of b about one."""
    smallest = int(ml_dtypes.finfo(a.numpy).minexp)
    initial = _patterns(F32, (m, n), seed + 2, smallest - 6, smallest + 2)
    return _patterns(a, (m, k), seed, smallest - 1, smallest - 1), _patterns(b, (k, n), seed + 1, -6, 6), initial


def _zero_products(a: DType, b: DType, m: int, n: int, k: int, seed: int) -> Made:
    """Large numbers times zeros, beside tiny products in half of the rows and beside tiny accumulators."""
    x, y, initial = _tiny(a, b, m, n, k, seed)
    large = _patterns(a, (m, k), seed + 3, 100, 126)
    x[:, ::2] = large[:, ::2]
    y[::2] = generate("signed-zero", b, (k, n), seed + 4)[::2] * b.numpy.type(0)
    x[::2, 1::2] *= a.numpy.type(0)
    return x, y, initial


def _opposed(a: DType, b: DType, m: int, n: int, k: int, seed: int) -> Made:
    """An accumulator that the products nearly cancel."""
    x, y = generate("wide", a, (m, k), seed), generate("normal", b, (k, n), seed + 1)
    with np.errstate(all="ignore"):
        return x, y, -(x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32)


_MADE: dict[str, Callable[..., Made]] = {
    "sums of 33 bits": _full,
    "the edge of overflow": _edge,
    "sums about the floor": _tiny,
    "subnormal operands": _subnormal_operands,
    "large zero products": _zero_products,
    "accumulator opposed": _opposed,
}

CASES = len(_KINDS) + len(_MADE)  # each with and without an accumulator


def cases(a: DType, b: DType, m: int, n: int, k: int, seed: int = 0) -> Iterator[Case]:
    """Every set of operands, first from +0, then from its accumulator."""
    for index, (name, kinds) in enumerate(_KINDS.items()):
        key = seed + 10 * index
        x, y = generate(kinds[0], a, (m, k), key), generate(kinds[1], b, (k, n), key + 1)
        yield Case(name, x, y, None)
        yield Case(f"{name}, accumulator", x, y, generate(kinds[2], F32, (m, n), key + 2))
    for index, (name, make) in enumerate(_MADE.items()):
        x, y, initial = make(a, b, m, n, k, seed + 1000 + 10 * index)
        yield Case(name, x, y, None)
        yield Case(f"{name}, accumulator", x, y, initial)
