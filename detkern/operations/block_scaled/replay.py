"""The contract `fp8-block128` in NumPy: the definition one can run. gemm/replay.py says what a caller has to see to."""

from __future__ import annotations

import numpy as np

from ...errors import ContractUnsupported, ShapeError
from ...vocabulary.arithmetic.binary32 import Array, fma
from ...vocabulary.contracts import FP8_BLOCK128
from ...vocabulary.dtypes import F32, DType, from_numpy
from ..gemm.replay import chain_of, finish, tiles

__all__ = ["block_scaled_gemm"]


def block_scaled_gemm(
    a: Array,
    scale_a: Array,
    b: Array,
    scale_b: Array,
    *,
    initial: Array | None = None,
    out_dtype: DType = F32,
) -> Array:
    """The `fp8-block128` product of a [M, K] and b [K, N], as a new [M, N] array of `out_dtype`.

    a, b:             float8_e4m3fn or float8_e5m2, in any pairing; K a multiple of 128.
    scale_a, scale_b: float32 [M, K / 128] and [K / 128, N].
    initial:          float32 [M, N]; where the accumulation over blocks starts.

    Raises ContractUnsupported or ShapeError.
    """
    for values in (a, b):
        if from_numpy(values.dtype) not in FP8_BLOCK128.operands:
            raise ContractUnsupported(f"{FP8_BLOCK128} does not take {values.dtype}")
    block = FP8_BLOCK128.k_multiple
    blocks = a.shape[1] // block
    if b.shape[0] != a.shape[1] or blocks * block != a.shape[1]:
        raise ShapeError(f"a {a.shape} and b {b.shape} must be [M, K] and [K, N], K a multiple of {block}")
    if scale_a.shape != (a.shape[0], blocks) or scale_b.shape != (blocks, b.shape[1]):
        shapes = f"scale_a {scale_a.shape} and scale_b {scale_b.shape}"
        raise ShapeError(f"{shapes} must be [M, K/{block}] and [K/{block}, N]")
    out = np.empty((a.shape[0], b.shape[1]), out_dtype.numpy)
    chain = chain_of(FP8_BLOCK128)
    with np.errstate(all="ignore"):
        for rows, cols in tiles(*out.shape):
            zeros = np.zeros(out[rows, cols].shape, np.float32)
            acc = zeros if initial is None else initial[rows, cols].astype(np.float32)
            for index in range(blocks):
                ks = slice(index * block, (index + 1) * block)
                scale = scale_a[rows, index, None] * scale_b[None, index, cols]
                acc = fma(scale, chain(zeros, a[rows, ks], b[ks, cols]), acc)
            out[rows, cols] = finish(acc, None, out_dtype)
    return out
