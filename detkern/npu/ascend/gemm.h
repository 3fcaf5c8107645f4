// Contracts `tree` and `fma` (f16, bf16) on the vector units of Ascend AI cores.
//
// Never run on such a device: compiled and run on the host against tests/emulation (docs/npu.md).
//
// Arithmetic  Muls, then Add: the fused form where the product is exact in binary32, always for f16. For bf16 the
//             smallest and largest magnitudes of each piece of A and B are compared, and rows of A whose products may
//             lie below 2^-134 or at 2^128 and above are computed in integers (exact_fma.h) on the scalar unit. NaNs
//             are made canonical at the end. The device must be in Inf/NaN mode (its default).
// Tile        ROWS x 256 outputs, ROWS at most 8 and fewer for deep trees, whose waiting nodes must fit; each is
//             reduced end to end by one block. A piece is 32 k (a leaf); 8 or 2 k where no dimension of A or of B is
//             contiguous.
// Launch      min(tiles, vector cores) blocks, each walking tiles by GetBlockNum(); any number of blocks is right.
// Memory      Unified Buffer, in bytes: B's pieces 2 x 16384, A's 2 x 2048, the output's 2 x 8192, both in binary32
//             32768 + 4096, gathered B 16384, accumulators and products 2 x 8192, waiting nodes 49152, the rest 10272:
//             178 KB of 192, so that 8 KB are left to Select.
// Loads       any strides, of any sign, in 64 bits, at any byte address: contiguous lines by DataCopyPad, others
//             gathered.
//
// The APIs, each with the page of the Ascend C API reference that it follows, are listed in docs/npu.md (CANN 8.5.0).
#pragma once

#include "columns.h"

#ifndef DETKERN_LEVEL_BYTES
#define DETKERN_LEVEL_BYTES 49152  // local memory for the waiting nodes of a tree
#endif

namespace detkern {

constexpr int32_t MAX_ROWS = 8;
constexpr int32_t SPREAD_K_OF_A = 8, A_BYTES = MAX_ROWS * SPREAD_K_OF_A * BLOCK_BYTES;

// An array in global memory; strides are in bytes.
struct Operand {
  uint64_t address;
  int64_t row, col;
  int64_t batch[DETKERN_MAX_BATCH_RANK];
};

struct GemmParams {
  int64_t m, n, k, tiles;
  int64_t batch_shape[DETKERN_MAX_BATCH_RANK];
  Operand a, b, out;
  uint64_t bias;
  int64_t bias_stride;
  int32_t batch_rank, out_dtype, bias_dtype, accumulate, rows, levels;
};

__aicore__ inline int64_t BatchOffset(const int64_t* shape, const int64_t* strides, int32_t rank, int64_t batch) {
  int64_t offset = 0;
  for (int32_t axis = rank - 1; axis >= 0; --axis) {
    const int64_t outer = batch / shape[axis];
    offset += (batch - outer * shape[axis]) * strides[axis];
    batch = outer;
  }
  return offset;
}

// Where a leaf of a mid-split tree ends: the path from the root takes `depth` steps, the last `rights` of them to a
// right child. So many nodes end with it; their left children wait at depths depth, depth - 1, ..., and what ends as a
// left child waits at its own depth, where no other can wait then.
struct LeafEnd {
  int32_t depth, rights;
};

__aicore__ inline LeafEnd EndOfLeaf(int64_t leaf, int64_t leaves) {
  int64_t low = 0, high = leaves;
  LeafEnd end = {0, 0};
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    ++end.depth;
    if (leaf < middle) {
      high = middle;
      end.rights = 0;
    } else {
      low = middle;
      ++end.rights;
    }
  }
  return end;
}

template <int32_t CONTRACT, int32_t DTYPE>
class Gemm : public Columns {
 public:
  __aicore__ inline explicit Gemm(const GemmParams& params) : p_(params) {}

  __aicore__ inline void Process() {
    Init();
    pipe_.InitBuffer(lines_of_a_, 2, A_BYTES);
    pipe_.InitBuffer(a_, A_BYTES * 2);
    pipe_.InitBuffer(b_, PIECE_BYTES * 2);
    pipe_.InitBuffer(accumulators_, MAX_ROWS * TILE_N * 4);
    pipe_.InitBuffer(products_, MAX_ROWS * TILE_N * 4);
    pipe_.InitBuffer(bias_, TILE_N * 4);
    if (CONTRACT == DETKERN_TREE) {
      pipe_.InitBuffer(waiting_, DETKERN_LEVEL_BYTES);
      pipe_.InitBuffer(node_, MAX_ROWS * TILE_N * 2);
    }
    if (DTYPE == DETKERN_BF16) {
      pipe_.InitBuffer(size_mask_, TILE_N * 2);
      AscendC::Duplicate(size_mask_.Get<uint16_t>(), static_cast<uint16_t>(0x7fff), TILE_N);
    }
    AscendC::Duplicate(bias_.Get<float>(), 0.0f, TILE_N);
    for (int64_t tile = AscendC::GetBlockIdx(); tile < p_.tiles; tile += AscendC::GetBlockNum()) Compute(tile);
  }

 private:
  __aicore__ inline void Compute(int64_t tile) {
    const int64_t row_tiles = (p_.m + p_.rows - 1) / p_.rows, column_tiles = (p_.n + TILE_N - 1) / TILE_N;
    const int64_t batch = tile / (row_tiles * column_tiles), inside = tile % (row_tiles * column_tiles);
    const int64_t row = inside % row_tiles * p_.rows, column = inside / row_tiles * TILE_N;
    rows_ = static_cast<int32_t>(Smaller(p_.rows, p_.m - row));
    columns_ = static_cast<int32_t>(Smaller(TILE_N, p_.n - column));
    width_ = RoundUp(columns_, 16);
    const uint64_t a = p_.a.address + BatchOffset(p_.batch_shape, p_.a.batch, p_.batch_rank, batch) + row * p_.a.row;
    const uint64_t b =
        p_.b.address + BatchOffset(p_.batch_shape, p_.b.batch, p_.batch_rank, batch) + column * p_.b.col;
    const uint64_t out = p_.out.address + BatchOffset(p_.batch_shape, p_.out.batch, p_.batch_rank, batch) +
                         row * p_.out.row + column * p_.out.col;
    const AscendC::LocalTensor<float> acc = accumulators_.Get<float>(), products = products_.Get<float>();
    AscendC::Duplicate(acc, 0.0f, MAX_ROWS * TILE_N);
    VectorBarrier();
    if (CONTRACT == DETKERN_FMA && p_.accumulate) LoadOut(acc, out);
    if (p_.k > 0) Reduce(a, b);
    if (CONTRACT == DETKERN_TREE && p_.accumulate) {
      AscendC::Duplicate(products, 0.0f, MAX_ROWS * TILE_N);
      VectorBarrier();
      LoadOut(products, out);
      AscendC::Add(acc, products, acc, rows_ * TILE_N);
      VectorBarrier();
    }
    AscendC::Adds(acc, acc, 0.0f, rows_ * TILE_N);
    VectorBarrier();
    if (p_.bias_dtype) {
      LoadLine(bias_.Get<float>(), p_.bias + column * p_.bias_stride, columns_, p_.bias_stride, p_.bias_dtype);
      VectorBarrier();
      for (int32_t m = 0; m < rows_; ++m) AscendC::Add(acc[m * TILE_N], acc[m * TILE_N], bias_.Get<float>(), TILE_N);
      VectorBarrier();
    }
    for (int32_t m = 0; m < rows_; ++m)
      StoreLine(out + m * p_.out.row, acc[m * TILE_N], columns_, p_.out.col, p_.out_dtype);
  }

  __aicore__ inline void LoadOut(const AscendC::LocalTensor<float>& to, uint64_t out) {
    for (int32_t m = 0; m < rows_; ++m)
      LoadLine(to[m * TILE_N], out + m * p_.out.row, columns_, p_.out.col, DETKERN_F32);
    VectorBarrier();
  }

  // All of K, piece by piece; the next piece is on its way while one is computed.
  __aicore__ inline void Reduce(uint64_t a, uint64_t b) {
    layout_ = p_.b.col == 2 ? ADJACENT : p_.b.row == 2 ? ALONG_K : SPREAD;
    const bool spread_a = p_.a.col != 2 && p_.a.row != 2;
    const int32_t depth = static_cast<int32_t>(Smaller(PieceDepth(layout_, 2), spread_a ? SPREAD_K_OF_A : LEAF));
    FetchPieces(a, b, 0, depth);
    for (int64_t k = 0; k < p_.k; k += depth) {
      if (k + depth < p_.k) FetchPieces(a, b, k + depth, depth);
      Multiply(static_cast<int32_t>(Smaller(depth, p_.k - k)));
      if (CONTRACT == DETKERN_TREE && ((k + depth) % LEAF == 0 || k + depth >= p_.k)) FinishLeaf(k / LEAF);
    }
  }

  __aicore__ inline void FetchPieces(uint64_t a, uint64_t b, int64_t k, int32_t depth) {
    const int32_t here = static_cast<int32_t>(Smaller(depth, p_.k - k));
    AscendC::LocalTensor<uint8_t> lines = lines_of_a_.AllocTensor<uint8_t>();
    const uint64_t from = a + k * p_.a.col;
    if (p_.a.col == 2) {
      CopyIn(lines, from, rows_, here * 2, p_.a.row, RoundUp(here * 2, BLOCK_BYTES));
    } else if (p_.a.row == 2) {
      CopyIn(lines, from, here, rows_ * 2, p_.a.col, BLOCK_BYTES);
    } else {
      for (int32_t i = 0; i < here; ++i)
        CopyIn(lines[i * rows_ * BLOCK_BYTES], from + i * p_.a.col, rows_, 2, p_.a.row, BLOCK_BYTES);
    }
    lines_of_a_.EnQue(lines);
    Fetch(layout_, b + k * p_.b.row, here, columns_, p_.b.row, p_.b.col, 2);
  }

  // acc[m] = acc[m] + a[m, k] * b[k], k ascending, over the pieces that are next in the queues.
  __aicore__ inline void Multiply(int32_t depth) {
    AscendC::LocalTensor<uint8_t> lines = lines_of_a_.DeQue<uint8_t>();
    const AscendC::LocalTensor<float> a = a_.Get<float>(), b = b_.Get<float>();
    const int32_t elements = p_.a.col == 2   ? rows_ * RoundUp(depth, 16)
                             : p_.a.row == 2 ? depth * 16
                                             : depth * rows_ * 16;
    const int32_t row_pitch = p_.a.col == 2 ? RoundUp(depth, 16) : p_.a.row == 2 ? 1 : 16;
    const int32_t k_pitch = p_.a.col == 2 ? 1 : p_.a.row == 2 ? 16 : rows_ * 16;
    Upcast(a, lines.ReinterpretCast<uint16_t>(), DTYPE, elements);
    lines_of_a_.FreeTensor(lines);

    AscendC::LocalTensor<uint8_t> hold;
    const AscendC::LocalTensor<uint16_t> raw = Take16(layout_, depth, columns_, hold);
    int32_t largest = 0, smallest = 0;
    if (DTYPE == DETKERN_BF16) Range(raw, depth * width_, largest, smallest);
    Upcast(b, raw, DTYPE, depth * width_);
    pieces_.FreeTensor(hold);
    Order<AscendC::HardEvent::V_S>();
    VectorBarrier();

    bool exact[MAX_ROWS], all = true;
    for (int32_t m = 0; m < rows_; ++m) {
      exact[m] = DTYPE != DETKERN_BF16 || ProductsAreExact(a, m * row_pitch, k_pitch, depth, largest, smallest);
      all = all && exact[m];
    }
    const AscendC::LocalTensor<float> acc = accumulators_.Get<float>(), products = products_.Get<float>();
    for (int32_t k = 0; k < depth; ++k) {
      for (int32_t m = 0; m < rows_; ++m)
        if (exact[m])
          AscendC::Muls(products[m * TILE_N], b[k * width_], a.GetValue(m * row_pitch + k * k_pitch), columns_);
      VectorBarrier();
      for (int32_t m = 0; m < rows_; ++m)
        if (exact[m]) AscendC::Add(acc[m * TILE_N], acc[m * TILE_N], products[m * TILE_N], columns_);
      VectorBarrier();
    }
    for (int32_t m = 0; m < rows_ && !all; ++m)
      if (!exact[m]) MultiplyExactly(m, a, m * row_pitch, k_pitch, depth);
    Order<AscendC::HardEvent::S_V>();  // before a and acc are written again
  }

  // The largest magnitude, and the smallest that is not zero (0x8000 where all are), of bf16 elements, as bits. b_ is
  // scratch.
  __aicore__ inline void Range(const AscendC::LocalTensor<uint16_t>& raw, int32_t count, int32_t& largest,
                               int32_t& smallest) {
    const AscendC::LocalTensor<int16_t> high = b_.Get<int16_t>(), low = high[PIECE_BYTES / 2];
    const AscendC::LocalTensor<uint16_t> mask = size_mask_.Get<uint16_t>();
    for (int32_t i = 0; i < count; i += TILE_N)
      AscendC::And(high[i].ReinterpretCast<uint16_t>(), raw[i], mask, i + TILE_N < count ? TILE_N : count - i);
    VectorBarrier();
    // Less one, a zero is the largest number.
    AscendC::Adds(low, high, static_cast<int16_t>(-1), count);
    VectorBarrier();
    for (int32_t i = 0; i < count; i += TILE_N) {
      const AscendC::LocalTensor<uint16_t> part = low[i].ReinterpretCast<uint16_t>();
      AscendC::And(part, part, mask, i + TILE_N < count ? TILE_N : count - i);
    }
    VectorBarrier();
    for (int32_t blocks = count / 16; blocks > 1;) {
      const int32_t half = (blocks + 1) / 2;
      AscendC::Max(high, high, high[half * 16], (blocks - half) * 16);
      AscendC::Min(low, low, low[half * 16], (blocks - half) * 16);
      VectorBarrier();
      blocks = half;
    }
    Order<AscendC::HardEvent::V_S>();
    largest = 0;
    smallest = 0x8000;
    for (int32_t i = 0; i < 16; ++i) {
      const int32_t most = high.GetValue(i), least = low.GetValue(i) + 1;
      largest = most > largest ? most : largest;
      smallest = least < smallest ? least : smallest;
    }
    Order<AscendC::HardEvent::S_V>();
  }

  // The exponent, biased by 127, of the first digit of a bf16 magnitude that is not zero.
  __aicore__ static inline int32_t Exponent(int32_t bits) { return bits >= 0x80 ? bits >> 7 : BitLength(bits) - 7; }

  // Whether all products of a row of A's piece with B's are zero or 2^-134 <= |p| < 2^128.
  __aicore__ static inline bool ProductsAreExact(const AscendC::LocalTensor<float>& a, int32_t start, int32_t pitch,
                                                 int32_t depth, int32_t largest, int32_t smallest) {
    int32_t most = 0, least = 0x8000;
    for (int32_t k = 0; k < depth; ++k) {
      const uint32_t bits = a.ReinterpretCast<uint32_t>().GetValue(start + k * pitch);
      const int32_t size = static_cast<int32_t>(bits >> 16 & 0x7fff);
      most = size > most ? size : most;
      least = size && size < least ? size : least;
    }
    if (most == 0 && largest < 0x7f80) return true;
    if (largest == 0 && most < 0x7f80) return true;
    if (most >= 0x7f80 || largest >= 0x7f80) return false;
    // |x| < 2^(e - 126) and >= 2^(e - 127) for an exponent e.
    return Exponent(most) + Exponent(largest) <= 380 && Exponent(least) + Exponent(smallest) >= 120;
  }

  __aicore__ inline void MultiplyExactly(int32_t m, const AscendC::LocalTensor<float>& a, int32_t start, int32_t pitch,
                                         int32_t depth) {
    const AscendC::LocalTensor<uint32_t> factors = a.ReinterpretCast<uint32_t>();
    const AscendC::LocalTensor<uint32_t> b = b_.Get<uint32_t>(), acc = accumulators_.Get<uint32_t>()[m * TILE_N];
    for (int32_t k = 0; k < depth; ++k) {
      const uint32_t factor = factors.GetValue(start + k * pitch);
      for (int32_t n = 0; n < columns_; ++n)
        acc.SetValue(n, ExactFma(factor, b.GetValue(k * width_ + n), acc.GetValue(n)));
    }
  }

  __aicore__ inline AscendC::LocalTensor<uint16_t> Waiting(int32_t depth) {
    return waiting_.Get<uint16_t>()[(depth - 1) * p_.rows * TILE_N];
  }

  // Rounds the leaf in the accumulators, adds the nodes that end with it, and leaves the accumulators at +0, or at the
  // root after the last leaf.
  __aicore__ inline void FinishLeaf(int64_t leaf) {
    const int64_t leaves = (p_.k + LEAF - 1) / LEAF;
    const LeafEnd end = EndOfLeaf(leaf, leaves);
    const int32_t left = end.depth - end.rights;  // the depth of the last node that ends; 0: the root
    const AscendC::LocalTensor<float> acc = accumulators_.Get<float>(), other = products_.Get<float>();
    const AscendC::LocalTensor<uint16_t> node = node_.Get<uint16_t>();
    const int32_t count = rows_ * TILE_N;
    Round(end.rights == 0 && left > 0 ? Waiting(left) : node, acc, DTYPE, count);
    VectorBarrier();
    for (int32_t i = 0; i < end.rights; ++i) {
      Upcast(acc, node, DTYPE, count);
      Upcast(other, Waiting(end.depth - i), DTYPE, count);
      VectorBarrier();
      AscendC::Add(acc, other, acc, count);
      VectorBarrier();
      Round(i + 1 == end.rights && left > 0 ? Waiting(left) : node, acc, DTYPE, count);
      VectorBarrier();
    }
    if (left > 0)
      AscendC::Duplicate(acc, 0.0f, count);
    else
      Upcast(acc, node, DTYPE, count);
    VectorBarrier();
  }

  const GemmParams& p_;
  Layout layout_ = ADJACENT;
  int32_t rows_ = 0, columns_ = 0, width_ = 0;  // of this tile; width_: the pitch of a piece of B
  AscendC::TQue<AscendC::TPosition::VECIN, 2> lines_of_a_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> a_, b_, accumulators_, products_, bias_, waiting_, node_, size_mask_;
};

}  // namespace detkern
