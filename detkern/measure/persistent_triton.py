"""A persistent matmul in Triton as batch-invariant modes use one: fixed tile, one program a multiprocessor, no split of
K.

The tile and the launch are what vLLM publishes for its batch-invariant mode
(vllm/model_executor/layers/batch_invariant.py: bf16 and f16 tiles of 128 x 128 x 64, bands of 8 tiles, 3 stages, 8
warps; after Thinking Machines' batch_invariant_ops): for every product, whatever its size. The kernel is our own; its
walk, its loads by pointer and its one flattened loop over tiles are of the same kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["BAND", "BLOCK_K", "BLOCK_M", "BLOCK_N", "STAGES", "WARPS", "call", "persistent_matmul"]

BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES, WARPS = 128, 128, 64, 8, 3, 8
_LARGE = 2**31  # elements, from which offsets need 64 bits


@triton.jit
def _place(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Row and column of a tile: bands of BAND tile rows, each walked down its columns."""
    band = tile // (BAND * tiles_n)
    height = min(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


@triton.jit
def persistent_matmul(
    a, b, out, m, n, k, a_row, a_col, b_row, b_col, out_row, out_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """out[m, n] = a[m, k] @ b[k, n], summed in float32. WIDE: offsets need 64 bits."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    ks = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _place(tile, tiles_m, tiles_n, BAND)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and columns outside are read from the first one: no mask in the loop but that of k.
        safe_rows = tl.max_contiguous(tl.multiple_of(tl.where(rows < m, rows, 0), BLOCK_M), BLOCK_M)
        safe_columns = tl.max_contiguous(tl.multiple_of(tl.where(columns < n, columns, 0), BLOCK_N), BLOCK_N)
        if WIDE:
            safe_rows = safe_rows.to(tl.int64)
            safe_columns = safe_columns.to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            here = step * BLOCK_K + ks
            if WIDE:
                here = here.to(tl.int64)
            left = k - step * BLOCK_K
            x = tl.load(a + safe_rows[:, None] * a_row + here[None, :] * a_col, mask=ks[None, :] < left, other=0.0)
            y = tl.load(b + here[:, None] * b_row + safe_columns[None, :] * b_col, mask=ks[:, None] < left, other=0.0)
            total = tl.dot(x, y, total)
        if WIDE:
            rows = rows.to(tl.int64)
            columns = columns.to(tl.int64)
        places = out + rows[:, None] * out_row + columns[None, :] * out_col
        inside = (rows[:, None] < m) & (columns[None, :] < n)
        tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@functools.cache
def _multiprocessors() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def call(a: Any, b: Any, out: Any, programs: int | None = None) -> Callable[[], Any]:
    """The call that computes a [M, K] @ b [K, N] into out, all of one 16-bit type and of any strides.

    programs: at most, instead of one a multiprocessor.
    """
    (m, k), n = a.shape, b.shape[1]
    most = programs or _multiprocessors()
    grid = (min(most, triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N)),)
    wide = max(tensor.numel() for tensor in (a, b, out)) > _LARGE
    return functools.partial(
        persistent_matmul[grid], a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(), BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, BAND=BAND, PROGRAMS=most, WIDE=wide, num_stages=STAGES, num_warps=WARPS,
    )  # fmt: skip
