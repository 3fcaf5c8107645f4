"""Operands that are the same bits on every machine: a versioned, counter-based generator.

Element i of an array is a function of (VERSION, kind, type, seed, flat row-major index i) alone, worked out in 64-bit
integers: no state, no NumPy random generator, no transcendental function. Two machines that name the same five things
therefore hold the same operands, and any piece of an array can be made without the rest.

The streams never change under a version: what `generate` returns for VERSION = 1 it returns in every release. Another
stream is another version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from .dtypes import BF16, E4M3, E5M2, F16, F32, DType

__all__ = ["KINDS", "VERSION", "Array", "digest", "generate"]

VERSION = 1

Words = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]

_CHUNK = 1 << 18  # elements made at a time, so that the 64-bit temporaries stay small beside the result
_DRAWS = 4  # words that one element may use
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, 2^64 divided by the golden ratio: Weyl increment of the counter


def _mix(words: Words) -> Words:
    """A bijection of 64-bit words in which each input bit flips each output bit with a probability near one half
    (the finaliser "mix 13" of D. Stafford, 2011, as in Steele, Lea and Flood's SplitMix64, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _key(kind: str, dtype: DType, seed: int) -> Words:
    """The 64-bit key of a stream, as an array of one word."""
    text = f"detkern operands {VERSION} {kind} {dtype.name}".encode()
    text += bytes(-len(text) % 8)
    key = np.zeros(1, np.uint64)
    for word in (*np.frombuffer(text, "<u8"), np.uint64(seed)):
        key = _mix((key ^ word) + _GOLDEN)
    return key


class _Stream:
    """The random words of a run of elements, and the fields of their type."""

    def __init__(self, dtype: DType, key: Words, start: int, count: int) -> None:
        self.dtype = dtype
        info: Any = ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call]
        self.stored_bits = int(info.nmant)
        self.bias = 1 - int(info.minexp)
        # The largest exponent field of finite numbers: e4m3fn has no infinities and uses the last one too.
        self.top = (1 << int(info.nexp)) - (1 if dtype == E4M3 else 2)
        self._key = key
        self._counters = np.arange(start, start + count, dtype=np.uint64) * np.uint64(_DRAWS)

    def word(self, draw: int) -> Words:
        """Word `draw` of each element."""
        return _mix(self._key + (self._counters + np.uint64(draw)) * _GOLDEN)

    def pattern(self, sign: Words, field: Words, stored: Words) -> Words:
        """Bit patterns from a sign (its lowest bit), an exponent field and a significand (its lowest bits)."""
        stored = stored & np.uint64((1 << self.stored_bits) - 1)
        if self.dtype == E4M3:  # its one NaN sits at the end of the finite numbers
            stored = np.where((field == self.top) & (stored == 7), np.uint64(6), stored)
        shift = np.uint64(self.stored_bits)
        return ((sign & np.uint64(1)) << np.uint64(8 * self.dtype.itemsize - 1)) | (field << shift) | stored

    def field(self, word: Words, low: int, high: int) -> Words:
        """Exponent fields uniform in [low, high], from the upper half of `word`."""
        return np.uint64(low) + (word >> np.uint64(32)) % np.uint64(high - low + 1)

    def one_in(self, count: int, word: Words) -> npt.NDArray[np.bool_]:
        """True for one element in `count` (a power of two at most 256), from bits 8 to 15 of `word`."""
        return (word >> np.uint64(8)) % np.uint64(256) < 256 // count


def _rounded(stream: _Stream, numerators: npt.NDArray[np.int64], exponent: int) -> Words:
    """Bit patterns of numerators * 2^exponent, exact in binary64, rounded once to the type."""
    values = np.ldexp(numerators.astype(np.float64), exponent)
    return values.astype(stream.dtype.numpy).view(stream.dtype.bits).astype(np.uint64)


def _normal(stream: _Stream) -> Words:
    """The sum of twelve uniform 16-bit integers, centred and scaled by 2^-16: mean 0, variance 1, within ±6."""
    total = np.zeros(stream.word(0).shape, np.uint64)
    for draw in range(3):
        word = stream.word(draw)
        for lane in range(4):
            total += (word >> np.uint64(16 * lane)) & np.uint64(0xFFFF)
    return _rounded(stream, total.astype(np.int64) - 6 * 65535, -16)


def _integers(stream: _Stream) -> Words:
    """Whole numbers from -8 to 8, exact in every type."""
    return _rounded(stream, (stream.word(0) >> np.uint64(32)).astype(np.int64) % 17 - 8, 0)


def _wide(stream: _Stream) -> Words:
    """Exponents uniform over a range so wide that most terms of a sum vanish beside the largest, though sums of a few
    thousand products stay finite in binary32."""
    low, high = {F32: (-50, 50), BF16: (-50, 50), F16: (-14, 6), E4M3: (-6, 7), E5M2: (-14, 14)}[stream.dtype]
    word = stream.word(0)
    return stream.pattern(word, stream.field(word, low + stream.bias, high + stream.bias), stream.word(1))


def _cancel(stream: _Stream) -> Words:
    """±1 and ±2^h within three units in the last place: large terms cancel and leave small ones."""
    word = stream.word(0)
    high = {F32: 12, BF16: 12, F16: 10, E4M3: 6, E5M2: 10}[stream.dtype]
    field = np.where(stream.one_in(2, word), np.uint64(stream.bias + high), np.uint64(stream.bias))
    return stream.pattern(word, field, stream.word(1) & np.uint64(3))


def _sparse(stream: _Stream) -> Words:
    """Three zeros in four, else "normal"."""
    return np.where(stream.one_in(4, stream.word(3)), _normal(stream), np.uint64(0))


def _subnormal(stream: _Stream) -> Words:
    """Nearly one half subnormal, one in eight of the smallest exponents, the rest of those whose squares are subnormal
    but for one in 256 near one: operands, products and sums are subnormal in turn."""
    word = stream.word(0)
    choice = (word >> np.uint64(8)) % np.uint64(256)
    half = stream.bias // 2
    field = np.select(
        [choice < 112, choice < 144, choice < 255],
        [np.uint64(0), stream.field(word, 1, 2), stream.field(word, stream.bias - half - 4, stream.bias - half)],
        stream.field(word, stream.bias - 1, stream.bias),
    )
    return stream.pattern(word, field, stream.word(1))


def _large(stream: _Stream) -> Words:
    """One half near the largest finite number, one quarter zeros of both signs, one quarter of the smallest exponents:
    sums overflow, and large zero products stand beside tiny ones."""
    word = stream.word(0)
    choice = (word >> np.uint64(8)) % np.uint64(4)
    field = np.where(choice < 2, stream.field(word, stream.top - 3, stream.top), stream.field(word, 0, 2))
    stored = stream.word(1)
    zero = choice == 2
    return stream.pattern(word, np.where(zero, np.uint64(0), field), np.where(zero, np.uint64(0), stored))


def _signed_zero(stream: _Stream) -> Words:
    """One half zeros, else one or the smallest subnormal, each of either sign."""
    word = stream.word(0)
    choice = (word >> np.uint64(8)) % np.uint64(4)
    field = np.where(choice == 2, np.uint64(stream.bias), np.uint64(0))
    return stream.pattern(word, field, np.where(choice == 3, np.uint64(1), np.uint64(0)))


def _special(stream: _Stream) -> Words:
    """As "normal", with one element in 128 an infinity (e4m3fn has none: a zero) or a NaN of any payload, and one in 64
    a zero of either sign."""
    word = stream.word(3)
    zeros = np.zeros_like(word)
    result = np.where(stream.one_in(64, word >> np.uint64(8)), stream.pattern(word, zeros, zeros), _normal(stream))
    payload = (word >> np.uint64(40)) % np.uint64(1 << stream.stored_bits)
    payload = np.where((word >> np.uint64(36)) % np.uint64(4) == 0, np.maximum(payload, np.uint64(1)), zeros)
    special = stream.pattern(word, np.full_like(word, stream.top + 1), payload)
    if stream.dtype == E4M3:
        nan = (word & np.uint64(1)) << np.uint64(7) | np.uint64(0x7F)
        special = np.where(payload > 0, nan, stream.pattern(word, zeros, zeros))
    return np.where(stream.one_in(128, word), special, result)


def _tiny(stream: _Stream) -> Words:
    """Numbers whose products lie about 2^-133, where a tensor core's alignment ends (of narrower types the smallest
    ones), one in four a zero of either sign and one in 64 large: large zero products hide among tiny ones."""
    low, high = {F32: (-76, -67), BF16: (-76, -67), F16: (-15, -10), E4M3: (-7, -6), E5M2: (-15, -12)}[stream.dtype]
    word = stream.word(0)
    zero = stream.one_in(4, word)
    tiny = stream.field(word, low + stream.bias, high + stream.bias)
    field = np.where(stream.one_in(64, word >> np.uint64(8)), stream.field(word, stream.top - 3, stream.top), tiny)
    stored = np.where(zero, np.uint64(0), stream.word(1))
    return stream.pattern(word, np.where(zero, np.uint64(0), field), stored)


def _bits(stream: _Stream) -> Words:
    """Raw random bit patterns."""
    return stream.word(0) >> np.uint64(64 - 8 * stream.dtype.itemsize)


_MAKERS: dict[str, Callable[[_Stream], Words]] = {
    "normal": _normal,
    "integers": _integers,
    "wide": _wide,
    "cancel": _cancel,
    "sparse": _sparse,
    "subnormal": _subnormal,
    "large": _large,
    "signed-zero": _signed_zero,
    "tiny": _tiny,
    "special": _special,
    "bits": _bits,
}

KINDS: tuple[str, ...] = tuple(_MAKERS)


def generate(kind: str, dtype: DType, shape: tuple[int, ...], seed: int) -> npt.NDArray[Any]:
    """An array of `shape` and `dtype`, C-contiguous; every element is finite unless kind is "special" or "bits".

    kind: one of KINDS. seed: 0 to 2^64 - 1. Raises ArgumentError for another kind, seed or a negative size.
    """
    if kind not in _MAKERS:
        raise ArgumentError(f"kind={kind!r} does not exist; the kinds are {', '.join(KINDS)}")
    if not 0 <= seed < 1 << 64:
        raise ArgumentError(f"seed={seed!r} must be from 0 to 2^64 - 1")
    if any(size < 0 for size in shape):
        raise ArgumentError(f"shape={shape!r} has a negative size")
    count = math.prod(shape)
    key = _key(kind, dtype, seed)
    patterns = np.empty(count, dtype.bits)
    with np.errstate(all="ignore"):
        for start in range(0, count, _CHUNK):
            stop = min(start + _CHUNK, count)
            patterns[start:stop] = _MAKERS[kind](_Stream(dtype, key, start, stop - start))
    return patterns.view(dtype.numpy).reshape(shape)


def digest(array: npt.NDArray[Any]) -> str:
    """The SHA-256, in hexadecimal, of the array's elements in row-major order, each as little-endian bytes."""
    bits = np.dtype(f"u{array.dtype.itemsize}")
    patterns = np.ascontiguousarray(array).view(bits.newbyteorder(array.dtype.byteorder))
    return hashlib.sha256(patterns.astype(bits.newbyteorder("<"), copy=False).tobytes()).hexdigest()
