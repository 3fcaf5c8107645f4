"""The scattered sum in NumPy: the definition one can run. gemm/replay.py says what a caller has to see to."""

from __future__ import annotations

import numpy as np

from ...errors import ContractUnsupported, ShapeError
from ...vocabulary.arithmetic.binary32 import Array, Binary32
from ...vocabulary.dtypes import BF16, F16, F32, INDICES, from_numpy
from ..gemm.replay import finish

__all__ = ["scatter_sum"]

_LONG = 32  # a row that more sources name is added by itself: turn by turn would be one short addition for each of them
_PIECE = 1 << 18  # elements of its sources that are in binary32 at once


def scatter_sum(source: Array, index: Array, out: Array, *, accumulate: bool = False) -> None:
    """For each row r of out and each column one chain of binary32 additions over the sources i with index[i] = r,
    ascending.

    source:     float32, float16 or bfloat16 [M, N], any strides.
    index:      int32 or int64 [M]. What is outside of [0, rows) names no row.
    out:        [rows, N], float32, float16 or bfloat16; written.
    accumulate: the chains start at out, and a row that nothing names is left as it is; else they start at +0.

    Raises ContractUnsupported or ShapeError.
    """
    operand, place, result = (from_numpy(array.dtype) for array in (source, index, out))
    if operand not in (F32, F16, BF16) or place not in INDICES or result not in (F32, F16, BF16):
        raise ContractUnsupported(
            f"the scattered sum does not take source of {source.dtype} by index of {index.dtype} into {out.dtype}"
        )
    if source.ndim != 2 or index.shape != source.shape[:1] or out.ndim != 2 or out.shape[1] != source.shape[1]:
        raise ShapeError(
            f"source {list(source.shape)}, index {list(index.shape)} and out {list(out.shape)} must be [M, N], [M] and "
            "[rows, N]"
        )
    if not accumulate:
        out[...] = 0
    sources = np.flatnonzero((index >= 0) & (index < out.shape[0]))
    sources = sources[np.argsort(index[sources], kind="stable")]  # those of one row together, in their own order
    row_of = index[sources]
    begins = np.flatnonzero(np.diff(row_of, prepend=-1))
    rows, counts = row_of[begins], np.diff(begins, append=len(sources))
    with np.errstate(all="ignore"):
        acc = out[rows].astype(np.float32)
        short = np.flatnonzero(counts <= _LONG)
        for turn in range(_LONG):  # every row's first source, then every row's second, ...
            short = short[counts[short] > turn]
            if not len(short):
                break
            acc[short] += source[sources[begins[short] + turn]].astype(np.float32)
        for row in np.flatnonzero(counts > _LONG):
            acc[row] = _chain(acc[row], source, sources[begins[row] : begins[row] + counts[row]])
        out[rows] = finish(acc, None, result)


def _chain(acc: Binary32, source: Array, sources: Array) -> Binary32:
    """acc + source[sources[0]] + source[sources[1]] + ..., each sum rounded:
    add.accumulate adds one after the other."""
    step = max(1, _PIECE // max(source.shape[1], 1))
    for start in range(0, len(sources), step):
        piece = source[sources[start : start + step]].astype(np.float32)
        acc = np.add.accumulate(np.concatenate((acc[None], piece)), axis=0, dtype=np.float32)[-1]
    return acc
