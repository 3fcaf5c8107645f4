"""The bias gradient: for each column one ascending chain of binary32 additions over the rows, batch index by batch
index.

Contract  the column sum of docs/contracts.md.
Tile      BLOCK_N columns; the rows one after the other, UNROLL a turn.
Launch    grid (ceil(n / BLOCK_N), 1, 1), in pieces of at most 2^31 - 1.
Memory    none.
"""

import triton
import triton.language as tl

from .memory import typed_store, widened, window, within

_ARGUMENTS = (
    "first", "dc", "start", "out", "rows", "n", "row", "column", "start_stride", "out_stride", "out_code",
    "size0", "size1", "size2", "batch0", "batch1", "batch2",
)  # fmt: skip


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def column_sum(
    first: tl.int64, dc: tl.int64, start: tl.int64, out: tl.int64, rows: tl.int64, n: tl.int64,
    row: tl.int64, column: tl.int64, start_stride: tl.int64, out_stride: tl.int64, out_code: tl.int64,
    size0: tl.int64, size1: tl.int64, size2: tl.int64, batch0: tl.int64, batch1: tl.int64, batch2: tl.int64,
    OPERAND: tl.constexpr, ADJACENT: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """start: the address of float32 values that the chains start from, 0 for +0."""
    begin = (first.to(tl.int64) + tl.program_id(0)) * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    inside = columns < n
    if ADJACENT:
        places = window(dc, OPERAND, False) + within(begin, n, BLOCK_N, False)
    else:
        places = window(dc, OPERAND, False) + within(begin, n, BLOCK_N, False) * column.to(tl.int64)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    if start != 0:
        acc = tl.load(window(start, tl.float32, False) + columns * start_stride.to(tl.int64), mask=inside, other=0.0)
    turns = rows // UNROLL
    for i0 in range(size0):
        for i1 in range(size1):
            for i2 in range(size2):
                here = places + (i0 * batch0 + i1 * batch1 + i2 * batch2)
                for _ in range(turns):
                    for i in tl.static_range(UNROLL):
                        acc = acc + widened(tl.load(here + i * row))
                    here += UNROLL * row
                for _ in range(turns * UNROLL, rows):
                    acc = acc + widened(tl.load(here))
                    here += row
    typed_store(out, out_code, columns * out_stride.to(tl.int64), inside, acc + 0.0, False)
