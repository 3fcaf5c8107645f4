"""Contract `fma`: acc = fma(a[k], b[k], acc) in binary32 for k ascending, written out.

Contract  fma, on every device whose fused multiply-add and conversions are IEEE's (the self-check of backend.py looks).
Tile      BLOCK_M x BLOCK_N outputs; UNROLL k a turn of the loop. 16-bit operands are widened as they are loaded.
Launch    grid (tiles, 1, 1), tiles = batch * ceil(m / BLOCK_M) * ceil(n / BLOCK_N), in pieces of at most 2^31 - 1.
Memory    none: a program's threads read the values that they share through the L1 cache.
"""

import triton
import triton.language as tl

from .memory import ARGUMENTS, batch_offsets, finish, line, start_values, tile_origin, widened, window, within


@triton.jit
def fma_chain(
    acc, a_places, b_places, a_step, b_step, count, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(acc, a_places, b_places) after `count` more k: places are pointers to a[:, k] and b[k, :]."""
    turns = count // UNROLL
    for _ in range(turns):
        for i in tl.static_range(UNROLL):
            x = widened(tl.load(a_places + i * a_step))
            y = widened(tl.load(b_places + i * b_step))
            x = tl.broadcast_to(x[:, None], BLOCK_M, BLOCK_N)
            y = tl.broadcast_to(y[None, :], BLOCK_M, BLOCK_N)
            acc = tl.fma(x, y, acc)
        a_places += UNROLL * a_step
        b_places += UNROLL * b_step
    for _ in range(turns * UNROLL, count):
        x = tl.broadcast_to(widened(tl.load(a_places))[:, None], BLOCK_M, BLOCK_N)
        y = tl.broadcast_to(widened(tl.load(b_places))[None, :], BLOCK_M, BLOCK_N)
        acc = tl.fma(x, y, acc)
        a_places += a_step
        b_places += b_step
    return acc, a_places, b_places


@triton.jit(do_not_specialize=ARGUMENTS, do_not_specialize_on_alignment=ARGUMENTS)
def fma_gemm(
    first: tl.int64, a: tl.int64, b: tl.int64, out: tl.int64, bias: tl.int64, scratch: tl.int64,
    m: tl.int64, n: tl.int64, k: tl.int64,
    a_row: tl.int64, a_col: tl.int64, b_row: tl.int64, b_col: tl.int64, out_row: tl.int64, out_col: tl.int64,
    bias_stride: tl.int64, out_code: tl.int64, bias_code: tl.int64, size1: tl.int64, size2: tl.int64,
    a_batch0: tl.int64, a_batch1: tl.int64, a_batch2: tl.int64,
    b_batch0: tl.int64, b_batch1: tl.int64, b_batch2: tl.int64,
    out_batch0: tl.int64, out_batch1: tl.int64, out_batch2: tl.int64,
    OPERAND: tl.constexpr, A_PATH: tl.constexpr, B_PATH: tl.constexpr, OUT_PATH: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tile = first.to(tl.int64) + tl.program_id(0)
    batch, row, column = tile_origin(tile, m, n, BLOCK_M, BLOCK_N, BAND)
    a_offset, b_offset, out_offset = batch_offsets(
        batch, size1, size2, a_batch0, a_batch1, a_batch2, b_batch0, b_batch1, b_batch2,
        out_batch0, out_batch1, out_batch2,
    )  # fmt: skip
    rows = within(row, m, BLOCK_M, A_PATH == 2)
    columns = within(column, n, BLOCK_N, B_PATH == 2)
    a_places = window(a, OPERAND, A_PATH != 0) + line(a_offset, A_PATH != 0)
    a_places += rows if A_PATH == 2 else rows * line(a_row, A_PATH == 1)
    b_places = window(b, OPERAND, B_PATH != 0) + line(b_offset, B_PATH != 0)
    b_places += columns if B_PATH == 2 else columns * line(b_col, B_PATH == 1)
    a_step = 1 if A_PATH == 1 else line(a_col, A_PATH == 2)
    b_step = 1 if B_PATH == 1 else line(b_row, B_PATH == 2)

    if ACCUMULATE:
        acc = start_values(out, out_offset, row, column, m, n, out_row, out_col, BLOCK_M, BLOCK_N)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc, a_places, b_places = fma_chain(acc, a_places, b_places, a_step, b_step, k, UNROLL, BLOCK_M, BLOCK_N)
    finish(
        acc, out, out_code, out_offset, row, column, m, n, out_row, out_col, bias, bias_code, bias_stride,
        OUT_PATH, BLOCK_M, BLOCK_N,
    )  # fmt: skip
