"""The bias gradient in NumPy: the definition one can run. gemm/replay.py says what a caller has to see to."""

from __future__ import annotations

import numpy as np

from ...errors import ContractUnsupported, ShapeError
from ...vocabulary.arithmetic.binary32 import Array, add
from ...vocabulary.dtypes import BF16, F16, F32, DType, from_numpy
from ..gemm.replay import finish

__all__ = ["column_sum"]


def column_sum(dc: Array, *, initial: Array | None = None, out_dtype: DType | None = None) -> Array:
    """The bias gradient: for each column of dc [.., N] one chain of binary32 additions over the rows, which are those
    of all leading dimensions in row-major order; a new [N] array of `out_dtype`.

    dc:        float32, float16 or bfloat16, any strides.
    initial:   float32 [N]; where the chains start.
    out_dtype: float32, float16 or bfloat16; None: float32 with `initial`, else dc's type.

    Raises ContractUnsupported or ShapeError.
    """
    dtype = from_numpy(dc.dtype)
    if dtype not in (F32, F16, BF16):
        raise ContractUnsupported(f"the bias gradient does not take dc of {dc.dtype}")
    if dc.ndim == 0:
        raise ShapeError("dc must have a dimension")
    if out_dtype is None:
        out_dtype = dtype if initial is None else F32
    acc = np.zeros(dc.shape[-1], np.float32) if initial is None else initial.astype(np.float32)
    with np.errstate(all="ignore"):
        for row in np.ndindex(*dc.shape[:-1]):
            acc = add(acc, dc[row].astype(np.float32))
        return finish(acc, None, out_dtype)
