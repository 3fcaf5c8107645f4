"""What every Triton kernel of this package shares: addresses, load paths, the order of tiles, and the epilogue.

Kernels take addresses, sizes, strides and codes as integers that Triton is told not to specialise on. What may be
assumed of them is a load path, a constant that the launch code chooses (geometry.py) and the kernel is compiled for:

  0 STRIDED   any strides
  1 K_MAJOR   neighbours along k are adjacent, and k is a multiple of 8; lines begin at multiples of 16 bytes
  2 MN_MAJOR  neighbours along m (of A) or n (of B) are adjacent, and their number is a multiple of 8; lines as above

and for the output 0 (any strides) or 1 (rows of multiples of 8 adjacent elements at multiples of 16 bytes).
Element codes are those of dtypes.py: 1 binary32, 2 f16, 3 bf16; 0 is none.
"""

import triton
import triton.language as tl

# What every product takes at a launch: Triton may specialise on none of it.
ARGUMENTS = (
    "first", "a", "b", "out", "bias", "scratch", "m", "n", "k", "a_row", "a_col", "b_row", "b_col", "out_row",
    "out_col", "bias_stride", "out_code", "bias_code", "size1", "size2", "a_batch0", "a_batch1", "a_batch2", "b_batch0",
    "b_batch1", "b_batch2", "out_batch0", "out_batch1", "out_batch2",
)  # fmt: skip


@triton.jit
def window(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to elements of TYPE at an address, which 16 divides where ALIGNED."""
    pointer = address.to(tl.int64).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def line(stride, ALIGNED: tl.constexpr):
    """A stride, written so that the compiler sees the multiple of 8 that it is where ALIGNED."""
    wide = stride.to(tl.int64)
    return wide // 8 * 8 if ALIGNED else wide


@triton.jit
def within(first, extent, BLOCK: tl.constexpr, ADJACENT: tl.constexpr):
    """The BLOCK indices from `first` on; those beyond `extent` are replaced by ones that exist, whose results are not
    kept.
    ADJACENT: `extent` is a multiple of 8, so eights stay together."""
    index = first + tl.arange(0, BLOCK)
    if ADJACENT:
        index = tl.where(index < extent, index, index % 8)
        return tl.max_contiguous(tl.multiple_of(index, 8), 8)
    else:
        return tl.where(index < extent, index, 0)


@triton.jit
def batch_offsets(
    batch, size1, size2,
    a_batch0, a_batch1, a_batch2, b_batch0, b_batch1, b_batch2, out_batch0, out_batch1, out_batch2,
):  # fmt: skip
    """The offsets in elements of a, b and out at a linear index over three batch dimensions, the last one fastest."""
    outer = batch // size2
    i2 = batch - outer * size2
    i0 = outer // size1
    i1 = outer - i0 * size1
    return (
        i0 * a_batch0 + i1 * a_batch1 + i2 * a_batch2,
        i0 * b_batch0 + i1 * b_batch1 + i2 * b_batch2,
        i0 * out_batch0 + i1 * out_batch1 + i2 * out_batch2,
    )


@triton.jit
def tile_origin(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """(batch, row, column) of a tile: bands of BAND tile rows, walked column by column, so that programs that run
    together share rows of A and columns of B in the L2 cache."""
    rows = (m + BLOCK_M - 1) // BLOCK_M
    columns = (n + BLOCK_N - 1) // BLOCK_N
    batch = tile // (rows * columns)
    inside = tile - batch * (rows * columns)
    band = inside // (BAND * columns)
    inside = inside - band * (BAND * columns)
    height = tl.minimum(rows - band * BAND, BAND)
    column = inside // height
    row = band * BAND + inside - column * height
    return batch, row * BLOCK_M, column * BLOCK_N


@triton.jit
def start_values(address, offset, row, column, m, n, out_row, out_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The float32 output as it is: what an accumulation starts from."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    places = offset + rows[:, None] * out_row.to(tl.int64) + columns[None, :] * out_col.to(tl.int64)
    return tl.load(window(address, tl.float32, False) + places, mask=inside, other=0.0)


@triton.jit
def canonical(x):
    """x with every NaN the one of the contracts."""
    nan = tl.full(x.shape, 0x7FFFFFFF, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(x == x, x, nan)  # noqa: PLR0124  no NaN equals itself


@triton.jit
def widened(x):
    """16-bit or binary32 elements as binary32, exactly. bf16 by its bits, since Triton's interpreter converts it
    otherwise."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrowed(x, TYPE: tl.constexpr):
    """The bits of x rounded to a 16-bit TYPE, to nearest even, NaN as 0x7fff."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        narrow = x.to(TYPE).to(tl.int16, bitcast=True)
    return tl.where(x == x, narrow, tl.full(x.shape, 0x7FFF, tl.int16))  # noqa: PLR0124


@triton.jit
def typed_load(address, code, places, inside):
    """Elements of the type with a code, as binary32; zeros outside."""
    result = tl.zeros(places.shape, tl.float32)
    if code == 1:
        result = tl.load(window(address, tl.float32, False) + places, mask=inside, other=0.0)
    if code == 2:
        result = tl.load(window(address, tl.float16, False) + places, mask=inside, other=0.0).to(tl.float32)
    if code == 3:
        bits = tl.load(window(address, tl.int16, False) + places, mask=inside, other=0)
        result = widened(bits.to(tl.bfloat16, bitcast=True))
    return result


@triton.jit
def typed_store(address, code, places, inside, x, ALIGNED: tl.constexpr):
    """x rounded once to the type with a code, and stored."""
    if code == 1:
        tl.store(window(address, tl.float32, ALIGNED) + places, canonical(x), mask=inside)
    if code == 2:
        tl.store(window(address, tl.int16, ALIGNED) + places, narrowed(x, tl.float16), mask=inside)
    if code == 3:
        tl.store(window(address, tl.int16, ALIGNED) + places, narrowed(x, tl.bfloat16), mask=inside)


@triton.jit
def finish(
    acc, out, out_code, offset, row, column, m, n, out_row, out_col, bias, bias_code, bias_stride,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The epilogue of every contract: + 0, then bias, then one rounding. ROWS: the output's load path."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    acc = acc + 0.0
    if bias_code != 0:
        acc = acc + typed_load(bias, bias_code, columns * bias_stride.to(tl.int64), columns < n)[None, :]
    if ROWS:
        inside = (rows < m)[:, None] & (columns < n // 8 * 8)[None, :]
        places = offset // 8 * 8 + rows[:, None] * line(out_row, True) + columns[None, :]
    else:
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        places = offset + rows[:, None] * out_row.to(tl.int64) + columns[None, :] * out_col.to(tl.int64)
    typed_store(out, out_code, places, inside, acc, ROWS)
