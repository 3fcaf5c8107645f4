"""Contracts `tree` and `tree-mma16`: a mid-split tree over leaves of 32 k, merged as the leaves come.

Contract  tree (leaves are chains of fused multiply-adds) and, where tl.dot has the bits of mma16, tree-mma16 (leaves
are
          two groups of 16). Each leaf and each sum of two nodes is rounded to the operand type.
Merge     Node [lo, hi) splits at lo + (hi - lo) // 2. On the way from the root to a leaf, the right turns since the
last
          left one are the nodes that end with that leaf: so many waiting left children are added, the latest first, and
          the sum waits in turn.
Tile      BLOCK_M x BLOCK_N outputs, one leaf a step; fma leaves take UNROLL k a turn.
Launch    grid (programs, 1, 1): programs walk tiles from their own number on in steps of the grid, which bounds the
          scratch; any number of programs is right.
Memory    scratch, not initialised: programs * LEVELS * BLOCK_M * BLOCK_N elements of 2 bytes, LEVELS = max(1,
ceil(log2(
          ceil(k / 32)))): the left children that wait. Leaves by tl.dot also take shared memory, as in mma.py.
"""

import triton
import triton.language as tl

from .fma import fma_chain
from .memory import ARGUMENTS, batch_offsets, finish, line, narrowed, start_values, tile_origin, widened, window, within

_ARGUMENTS = (*ARGUMENTS, "tiles", "levels")


@triton.jit
def nodes_ended(leaf, leaves):
    """How many nodes of a tree of `leaves` leaves end with a leaf, beside the leaf itself."""
    low = leaf * 0
    high = leaves
    ended = leaf * 0
    while high - low > 1:
        middle = low + (high - low) // 2
        right = leaf >= middle
        ended = tl.where(right, ended + 1, 0)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return ended


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def tree_gemm(
    first: tl.int64, a: tl.int64, b: tl.int64, out: tl.int64, bias: tl.int64, scratch: tl.int64,
    m: tl.int64, n: tl.int64, k: tl.int64,
    a_row: tl.int64, a_col: tl.int64, b_row: tl.int64, b_col: tl.int64, out_row: tl.int64, out_col: tl.int64,
    bias_stride: tl.int64, out_code: tl.int64, bias_code: tl.int64, size1: tl.int64, size2: tl.int64,
    a_batch0: tl.int64, a_batch1: tl.int64, a_batch2: tl.int64,
    b_batch0: tl.int64, b_batch1: tl.int64, b_batch2: tl.int64,
    out_batch0: tl.int64, out_batch1: tl.int64, out_batch2: tl.int64,
    tiles: tl.int64, levels: tl.int64,
    OPERAND: tl.constexpr, A_PATH: tl.constexpr, B_PATH: tl.constexpr, OUT_PATH: tl.constexpr,
    ACCUMULATE: tl.constexpr, DOT_LEAVES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    LEAF: tl.constexpr = 32
    program = tl.program_id(0).to(tl.int64)
    waiting = window(scratch, tl.int16, True) + program * levels * (BLOCK_M * BLOCK_N)
    waiting += tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    leaves = (k.to(tl.int64) + LEAF - 1) // LEAF
    ks = tl.arange(0, LEAF)
    for tile in range(program, tiles.to(tl.int64), tl.num_programs(0).to(tl.int64)):
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

        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        top = leaves * 0
        for leaf in range(leaves):
            left = tl.minimum(k - leaf * LEAF, LEAF)
            value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if DOT_LEAVES:
                # Zeros behind the end of K change no bit of a group.
                x = tl.load(
                    a_places[:, None] + ks[None, :] * a_step, mask=ks[None, :] < line(left, A_PATH == 1), other=0.0
                )
                y = tl.load(
                    b_places[None, :] + ks[:, None] * b_step, mask=ks[:, None] < line(left, B_PATH == 1), other=0.0
                )
                value = tl.dot(x, y, value)
                a_places += LEAF * a_step
                b_places += LEAF * b_step
            else:
                value, a_places, b_places = fma_chain(
                    value, a_places, b_places, a_step, b_step, left, UNROLL, BLOCK_M, BLOCK_N
                )
            bits = narrowed(value, OPERAND)
            for _ in range(nodes_ended(leaf, leaves)):
                top -= 1
                tl.debug_barrier()  # a level may have been written by other threads of the program
                child = tl.load(waiting + top * (BLOCK_M * BLOCK_N)).to(OPERAND, bitcast=True)
                bits = narrowed(widened(child) + widened(bits.to(OPERAND, bitcast=True)), OPERAND)
            tl.debug_barrier()  # and may still be read by others
            tl.store(waiting + top * (BLOCK_M * BLOCK_N), bits)
            top += 1
            value = widened(bits.to(OPERAND, bitcast=True))
        if ACCUMULATE:
            value += start_values(out, out_offset, row, column, m, n, out_row, out_col, BLOCK_M, BLOCK_N)
        finish(
            value, out, out_code, out_offset, row, column, m, n, out_row, out_col, bias, bias_code, bias_stride,
            OUT_PATH, BLOCK_M, BLOCK_N,
        )  # fmt: skip
