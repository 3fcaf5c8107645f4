"""Contract `mma16` through tl.dot: one ascending chain of groups of 16 k, as the Hopper tensor core adds them.

Contract  mma16, on devices whose tl.dot has its bits (the self-check of backend.py says which). No split of K, no
          floating-point fusion, nothing tuned at run time: the tile is pinned by geometry.py and changes no bit.
Tile      BLOCK_M x BLOCK_N outputs, BLOCK_K k (a multiple of 16) a step; wgmma or mma.sync take the groups of 16 of a
          step in ascending order, with the accumulator carried through.
Launch    grid (tiles, 1, 1), tiles = batch * ceil(m / BLOCK_M) * ceil(n / BLOCK_N), in pieces of at most 2^31 - 1.
Memory    num_stages * BLOCK_K * (BLOCK_M + BLOCK_N) * 2 bytes of shared memory; no scratch.
"""

import triton
import triton.language as tl

from .memory import ARGUMENTS, batch_offsets, finish, line, start_values, tile_origin, window, within


@triton.jit(do_not_specialize=ARGUMENTS, do_not_specialize_on_alignment=ARGUMENTS)
def mma_gemm(
    first: tl.int64, a: tl.int64, b: tl.int64, out: tl.int64, bias: tl.int64, scratch: tl.int64,
    m: tl.int64, n: tl.int64, k: tl.int64,
    a_row: tl.int64, a_col: tl.int64, b_row: tl.int64, b_col: tl.int64, out_row: tl.int64, out_col: tl.int64,
    bias_stride: tl.int64, out_code: tl.int64, bias_code: tl.int64, size1: tl.int64, size2: tl.int64,
    a_batch0: tl.int64, a_batch1: tl.int64, a_batch2: tl.int64,
    b_batch0: tl.int64, b_batch1: tl.int64, b_batch2: tl.int64,
    out_batch0: tl.int64, out_batch1: tl.int64, out_batch2: tl.int64,
    OPERAND: tl.constexpr, A_PATH: tl.constexpr, B_PATH: tl.constexpr, OUT_PATH: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tile = first.to(tl.int64) + tl.program_id(0)
    batch, row, column = tile_origin(tile, m, n, BLOCK_M, BLOCK_N, BAND)
    a_offset, b_offset, out_offset = batch_offsets(
        batch, size1, size2, a_batch0, a_batch1, a_batch2, b_batch0, b_batch1, b_batch2,
        out_batch0, out_batch1, out_batch2,
    )  # fmt: skip
    ks = tl.arange(0, BLOCK_K)
    rows = within(row, m, BLOCK_M, A_PATH == 2)
    columns = within(column, n, BLOCK_N, B_PATH == 2)
    a_start = window(a, OPERAND, A_PATH != 0) + line(a_offset, A_PATH != 0)
    b_start = window(b, OPERAND, B_PATH != 0) + line(b_offset, B_PATH != 0)
    if A_PATH == 1:
        a_places = a_start + (rows[:, None] * line(a_row, True) + ks[None, :])
    elif A_PATH == 2:
        a_places = a_start + (rows[:, None] + ks[None, :] * line(a_col, True))
    else:
        a_places = a_start + (rows[:, None] * line(a_row, False) + ks[None, :] * line(a_col, False))
    if B_PATH == 1:
        b_places = b_start + (ks[:, None] + columns[None, :] * line(b_col, True))
    elif B_PATH == 2:
        b_places = b_start + (ks[:, None] * line(b_row, True) + columns[None, :])
    else:
        b_places = b_start + (ks[:, None] * line(b_row, False) + columns[None, :] * line(b_col, False))

    if ACCUMULATE:
        acc = start_values(out, out_offset, row, column, m, n, out_row, out_col, BLOCK_M, BLOCK_N)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps = (k // BLOCK_K).to(tl.int32)
    for _ in range(steps):
        acc = tl.dot(tl.load(a_places), tl.load(b_places), acc)
        a_places += BLOCK_K if A_PATH == 1 else BLOCK_K * line(a_col, A_PATH == 2)
        b_places += BLOCK_K if B_PATH == 1 else BLOCK_K * line(b_row, B_PATH == 2)
    left = k - steps.to(tl.int64) * BLOCK_K
    if left > 0:
        # Zeros behind the end of K change no bit of this contract.
        x = tl.load(a_places, mask=ks[None, :] < line(left, A_PATH == 1), other=0.0)
        y = tl.load(b_places, mask=ks[:, None] < line(left, B_PATH == 1), other=0.0)
        acc = tl.dot(x, y, acc)
    finish(
        acc, out, out_code, out_offset, row, column, m, n, out_row, out_col, bias, bias_code, bias_stride,
        OUT_PATH, BLOCK_M, BLOCK_N,
    )  # fmt: skip
