// Contracts `tree` and `fma` (f16, bf16) on the vector units of Ascend AI cores, and the bias gradient, behind abi.h.
//
// Never run on such a device: compiled and run on the host against tests/emulation (docs/npu.md).
//
// Arithmetic  Muls, then Add: the fused form where the product is exact in binary32, always for f16. For bf16 the smallest
//             and largest magnitudes of each piece of A and B are compared, and rows of A whose products may lie below 2^-134
//             or at 2^128 and above are computed in integers (exact_fma.h) on the scalar unit. NaNs are made canonical at
//             the end. The device must be in Inf/NaN mode (its default).
// Tile        ROWS x 256 outputs, ROWS at most 8 and fewer for deep trees, whose waiting nodes must fit; each is reduced end
//             to end by one block. A piece is 32 k (a leaf); 8 or 2 k where no dimension of A or of B is contiguous.
// Launch      min(tiles, vector cores) blocks, each walking tiles by GetBlockNum(); any number of blocks is right.
// Memory      Unified Buffer, in bytes: B's pieces 2 x 16384, A's 2 x 2048, the output's 2 x 8192, both in binary32 32768 +
//             4096, gathered B 16384, accumulators and products 2 x 8192, waiting nodes 49152, the rest 10272: 178 KB of 192,
//             so that 8 KB are left to Select.
// Loads       any strides, of any sign, in 64 bits, at any byte address: contiguous lines by DataCopyPad, others gathered.
//
// The APIs, each with the page of the Ascend C API reference that it follows, are listed in docs/npu.md (CANN 8.5.0).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>

#include "../../abi/checks.h"
#include "acl/acl.h"
#include "kernel_operator.h"

#include "exact_fma.h"

#ifndef DETKERN_LAUNCH
#define DETKERN_LAUNCH(kernel, blocks, stream, params) kernel<<<blocks, nullptr, stream>>>(params)
#endif
#ifndef DETKERN_HOST_MEMORY
#define DETKERN_HOST_MEMORY 0
#endif
#ifndef DETKERN_LEVEL_BYTES
#define DETKERN_LEVEL_BYTES 49152  // local memory for the waiting nodes of a tree
#endif

namespace detkern {

constexpr int32_t LEAF = 32;
constexpr int32_t TILE_N = 256, MAX_ROWS = 8;
constexpr int32_t PIECE_BYTES = LEAF * TILE_N * 2;
constexpr int32_t BLOCK_BYTES = 32;  // what local memory is addressed in
constexpr int32_t SPREAD_K = PIECE_BYTES / (TILE_N * BLOCK_BYTES);
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

struct SumParams {
  int64_t rows, columns, row_stride, col_stride, out_stride;
  int64_t batch_shape[DETKERN_MAX_SUM_RANK], batch_strides[DETKERN_MAX_SUM_RANK];
  uint64_t dc, out;
  int32_t batch_rank, dtype, out_dtype, accumulate;
};

__aicore__ inline int32_t SizeOf(int32_t dtype) { return dtype == DETKERN_F32 ? 4 : 2; }
__aicore__ inline int32_t RoundUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }
__aicore__ inline int64_t Smaller(int64_t x, int64_t y) { return x < y ? x : y; }

__aicore__ inline int64_t BatchOffset(const int64_t* shape, const int64_t* strides, int32_t rank, int64_t batch) {
  int64_t offset = 0;
  for (int32_t axis = rank - 1; axis >= 0; --axis) {
    const int64_t outer = batch / shape[axis];
    offset += (batch - outer * shape[axis]) * strides[axis];
    batch = outer;
  }
  return offset;
}

// Where a leaf of a mid-split tree ends: the path from the root takes `depth` steps, the last `rights` of them to a right
// child. So many nodes end with it; their left children wait at depths depth, depth - 1, ..., and what ends as a left
// child waits at its own depth, where no other can wait then.
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

// The pipelines' waits.
template <AscendC::HardEvent EVENT>
__aicore__ inline void Order() {
  const int32_t event = static_cast<int32_t>(AscendC::GetTPipePtr()->FetchEventID(EVENT));
  AscendC::SetFlag<EVENT>(event);
  AscendC::WaitFlag<EVENT>(event);
}
__aicore__ inline void VectorBarrier() { AscendC::PipeBarrier<PIPE_V>(); }

// Copies `lines` lines of `bytes` contiguous bytes, `stride` apart, to lines of local memory `pitch` apart, each filled with
// zeros to whole blocks.
__aicore__ inline void CopyIn(const AscendC::LocalTensor<uint8_t>& to, uint64_t from, int32_t lines, int32_t bytes,
                              int64_t stride, int32_t pitch) {
  const int32_t filled = RoundUp(bytes, BLOCK_BYTES);
  const AscendC::DataCopyPadExtParams<uint8_t> fill{true, 0, static_cast<uint8_t>(filled - bytes), 0};
  AscendC::GlobalTensor<uint8_t> source;
  source.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from));
  const int64_t gap = stride - bytes;
  if (lines > 1 && gap >= 0 && gap <= INT32_MAX) {
    const AscendC::DataCopyExtParams copy{static_cast<uint16_t>(lines), static_cast<uint32_t>(bytes),
                                          static_cast<uint32_t>(gap),
                                          static_cast<uint32_t>((pitch - filled) / BLOCK_BYTES), 0};
    AscendC::DataCopyPad(to, source, copy, fill);
    return;
  }
  const AscendC::DataCopyExtParams copy{1, static_cast<uint32_t>(bytes), 0, 0, 0};
  for (int32_t line = 0; line < lines; ++line) {
    source.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from + line * stride));
    AscendC::DataCopyPad(to[line * pitch], source, copy, fill);
  }
}

// The other way; lines begin at multiples of BLOCK_BYTES.
__aicore__ inline void CopyOut(uint64_t to, const AscendC::LocalTensor<uint8_t>& from, int32_t lines, int32_t bytes,
                               int64_t stride) {
  AscendC::GlobalTensor<uint8_t> target;
  target.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to));
  const int64_t gap = stride - bytes;
  if (lines > 1 && gap >= 0 && gap <= INT32_MAX) {
    const AscendC::DataCopyExtParams copy{static_cast<uint16_t>(lines), static_cast<uint32_t>(bytes), 0,
                                          static_cast<uint32_t>(gap), 0};
    AscendC::DataCopyPad(target, from, copy);
    return;
  }
  const AscendC::DataCopyExtParams copy{1, static_cast<uint32_t>(bytes), 0, 0, 0};
  for (int32_t line = 0; line < lines; ++line) {
    target.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to + line * stride));
    AscendC::DataCopyPad(target, from[line * RoundUp(bytes, BLOCK_BYTES)], copy);
  }
}

// What both kernels do with columns: bringing in rows of them, finishing and storing them.
class Columns {
 public:
  __aicore__ inline void Init() {
    pipe_.InitBuffer(pieces_, 2, PIECE_BYTES);
    pipe_.InitBuffer(results_, 2, TILE_N * BLOCK_BYTES);
    pipe_.InitBuffer(gathered_, PIECE_BYTES);
    pipe_.InitBuffer(line_, TILE_N * 4);
    pipe_.InitBuffer(mask_, BLOCK_BYTES);
    pipe_.InitBuffer(nan32_, TILE_N * 4);
    pipe_.InitBuffer(nan16_, TILE_N * 2);
    pipe_.InitBuffer(spread_offsets_, TILE_N * 4);
    pipe_.InitBuffer(line_offsets_, TILE_N * 4);
    AscendC::LocalTensor<uint32_t> spread = spread_offsets_.Get<uint32_t>(), lines = line_offsets_.Get<uint32_t>();
    for (int32_t i = 0; i < TILE_N; ++i) {
      spread.SetValue(i, static_cast<uint32_t>(i * BLOCK_BYTES));
      lines.SetValue(i, static_cast<uint32_t>(i * LEAF * 2));
    }
    AscendC::Duplicate(nan32_.Get<int32_t>(), static_cast<int32_t>(NAN_BITS), TILE_N);
    AscendC::Duplicate(nan16_.Get<int16_t>(), static_cast<int16_t>(0x7fff), TILE_N);
    Order<AscendC::HardEvent::S_V>();
    VectorBarrier();
  }

 protected:
  enum Layout { ADJACENT, ALONG_K, SPREAD };  // columns adjacent, k adjacent, neither

  // How many k of a piece come at once.
  __aicore__ static inline int32_t PieceDepth(Layout layout, int32_t size) {
    return layout == SPREAD ? SPREAD_K : LEAF * 2 / size;
  }

  // Enqueues a piece: `depth` rows of `columns` elements of `size` bytes.
  __aicore__ inline void Fetch(Layout layout, uint64_t from, int32_t depth, int32_t columns, int64_t k_stride,
                               int64_t column_stride, int32_t size) {
    AscendC::LocalTensor<uint8_t> piece = pieces_.AllocTensor<uint8_t>();
    if (layout == ADJACENT) {
      CopyIn(piece, from, depth, columns * size, k_stride, RoundUp(columns * size, BLOCK_BYTES));
    } else {
      // Whole blocks of columns are gathered, so the last column is there again where there are no more.
      const int32_t width = RoundUp(columns, BLOCK_BYTES / size);
      const int32_t pitch = layout == ALONG_K ? LEAF * size : BLOCK_BYTES;
      const int32_t rows = layout == ALONG_K ? 1 : depth, bytes = layout == ALONG_K ? depth * size : size;
      for (int32_t k = 0; k < rows; ++k) {
        const AscendC::LocalTensor<uint8_t> line = piece[k * TILE_N * BLOCK_BYTES];
        CopyIn(line, from + k * k_stride, columns, bytes, column_stride, pitch);
        for (int32_t column = columns; column < width; ++column)
          CopyIn(line[column * pitch], from + k * k_stride + (columns - 1) * column_stride, 1, bytes, 0, pitch);
      }
    }
    pieces_.EnQue(piece);
  }

  // The next piece of 16-bit elements as [depth][columns rounded up to 16]. `hold`: the queue's tensor, to be freed.
  __aicore__ inline AscendC::LocalTensor<uint16_t> Take16(Layout layout, int32_t depth, int32_t columns,
                                                          AscendC::LocalTensor<uint8_t>& hold) {
    hold = pieces_.DeQue<uint8_t>();
    AscendC::LocalTensor<uint16_t> raw = hold.ReinterpretCast<uint16_t>();
    if (layout == ADJACENT) return raw;
    AscendC::LocalTensor<uint16_t> rows = gathered_.Get<uint16_t>();
    const int32_t width = RoundUp(columns, 16);
    const AscendC::LocalTensor<uint32_t> offsets =
        layout == ALONG_K ? line_offsets_.Get<uint32_t>() : spread_offsets_.Get<uint32_t>();
    const int32_t step = layout == ALONG_K ? 2 : TILE_N * BLOCK_BYTES;
    VectorBarrier();  // after what reads the piece before
    for (int32_t k = 0; k < depth; ++k)
      AscendC::Gather(rows[k * width], raw, offsets, static_cast<uint32_t>(k * step), static_cast<uint32_t>(width));
    VectorBarrier();
    return rows;
  }

  // The next piece of f32 as [depth][columns rounded up to 8].
  __aicore__ inline AscendC::LocalTensor<float> Take32(Layout layout, int32_t depth, int32_t columns,
                                                       AscendC::LocalTensor<uint8_t>& hold) {
    hold = pieces_.DeQue<uint8_t>();
    AscendC::LocalTensor<float> raw = hold.ReinterpretCast<float>();
    if (layout == ADJACENT) return raw;
    AscendC::LocalTensor<float> rows = gathered_.Get<float>();
    const int32_t width = RoundUp(columns, 8);
    VectorBarrier();  // after what reads the piece before
    for (int32_t k = 0; k < depth; ++k)
      AscendC::Gather(rows[k * width], raw, spread_offsets_.Get<uint32_t>(),
                      static_cast<uint32_t>(k * TILE_N * BLOCK_BYTES), static_cast<uint32_t>(width));
    VectorBarrier();
    return rows;
  }

  // `count` 16-bit elements in binary32, exactly.
  __aicore__ static inline void Upcast(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<uint16_t>& from,
                                       int32_t dtype, int32_t count) {
    if (dtype == DETKERN_F16)
      AscendC::Cast(to, from.ReinterpretCast<half>(), AscendC::RoundMode::CAST_NONE, count);
    else
      AscendC::Cast(to, from.ReinterpretCast<bfloat16_t>(), AscendC::RoundMode::CAST_NONE, count);
  }

  // Rounded to nearest even; a NaN may have any payload.
  __aicore__ static inline void Round(const AscendC::LocalTensor<uint16_t>& to, const AscendC::LocalTensor<float>& from,
                                      int32_t dtype, int32_t count) {
    if (dtype == DETKERN_F16)
      AscendC::Cast(to.ReinterpretCast<half>(), from, AscendC::RoundMode::CAST_RINT, count);
    else
      AscendC::Cast(to.ReinterpretCast<bfloat16_t>(), from, AscendC::RoundMode::CAST_RINT, count);
  }

  // One line of `columns` elements of any of the three types in binary32.
  __aicore__ inline void LoadLine(const AscendC::LocalTensor<float>& to, uint64_t from, int32_t columns, int64_t stride,
                                  int32_t dtype) {
    const int32_t size = SizeOf(dtype);
    const Layout layout = stride == size ? ADJACENT : SPREAD;
    Fetch(layout, from, 1, columns, 0, stride, size);
    AscendC::LocalTensor<uint8_t> hold;
    if (dtype == DETKERN_F32)
      AscendC::Adds(to, Take32(layout, 1, columns, hold), 0.0f, columns);
    else
      Upcast(to, Take16(layout, 1, columns, hold), dtype, columns);
    pieces_.FreeTensor(hold);
  }

  // Finishes a line of TILE_N accumulators that has + 0 and bias already: NaN made canonical, one rounding, stored.
  __aicore__ inline void StoreLine(uint64_t to, const AscendC::LocalTensor<float>& values, int32_t columns,
                                   int64_t stride, int32_t dtype) {
    const int32_t size = SizeOf(dtype);
    const bool adjacent = stride == size;
    AscendC::LocalTensor<uint8_t> result = results_.AllocTensor<uint8_t>();
    const AscendC::LocalTensor<uint8_t> mask = mask_.Get<uint8_t>();
    AscendC::LocalTensor<uint8_t> line = adjacent ? result : line_.Get<uint8_t>();
    AscendC::Compare(mask, values, values, AscendC::CMPMODE::EQ, TILE_N);
    if (dtype == DETKERN_F32) {
      VectorBarrier();
      AscendC::Select(line.ReinterpretCast<float>(), mask, values, nan32_.Get<float>(),
                      AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, TILE_N);
    } else {
      Round(line.ReinterpretCast<uint16_t>(), values, dtype, TILE_N);
      VectorBarrier();
      const AscendC::LocalTensor<half> rounded = line.ReinterpretCast<half>();  // of either type: bits are selected
      AscendC::Select(rounded, mask, rounded, nan16_.Get<half>(), AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, TILE_N);
    }
    if (!adjacent) {
      VectorBarrier();
      const AscendC::BrcbRepeatParams blocks{1, 8};
      if (size == 4)
        AscendC::Brcb(result.ReinterpretCast<uint32_t>(), line.ReinterpretCast<uint32_t>(), TILE_N / 8, blocks);
      else
        AscendC::Brcb(result.ReinterpretCast<uint16_t>(), line.ReinterpretCast<uint16_t>(), TILE_N / 8, blocks);
    }
    results_.EnQue(result);
    result = results_.DeQue<uint8_t>();
    if (adjacent)
      CopyOut(to, result, 1, columns * size, 0);
    else
      CopyOut(to, result, columns, size, stride);
    results_.FreeTensor(result);
    VectorBarrier();
  }

  AscendC::TPipe pipe_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> pieces_;

 private:
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> results_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> gathered_, line_, mask_, nan32_, nan16_, spread_offsets_, line_offsets_;
};

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

// The bias gradient: a tile is 256 columns over all rows.
class ColumnSum : public Columns {
 public:
  __aicore__ inline explicit ColumnSum(const SumParams& params) : p_(params) {}

  __aicore__ inline void Process() {
    Init();
    pipe_.InitBuffer(accumulators_, TILE_N * 4);
    pipe_.InitBuffer(upcast_, PIECE_BYTES * 2);
    const int64_t tiles = (p_.columns + TILE_N - 1) / TILE_N;
    for (int64_t tile = AscendC::GetBlockIdx(); tile < tiles; tile += AscendC::GetBlockNum()) Compute(tile * TILE_N);
  }

 private:
  __aicore__ inline void Compute(int64_t column) {
    const int32_t columns = static_cast<int32_t>(Smaller(TILE_N, p_.columns - column));
    const AscendC::LocalTensor<float> acc = accumulators_.Get<float>();
    AscendC::Duplicate(acc, 0.0f, TILE_N);
    VectorBarrier();
    const uint64_t out = p_.out + column * p_.out_stride;
    if (p_.accumulate) {
      LoadLine(acc, out, columns, p_.out_stride, DETKERN_F32);
      VectorBarrier();
    }
    int64_t index[DETKERN_MAX_SUM_RANK] = {};
    uint64_t dc = p_.dc + column * p_.col_stride;
    for (bool more = p_.rows > 0; more;) {
      AddRows(acc, dc, columns);
      int32_t axis = p_.batch_rank - 1;
      for (; axis >= 0; --axis) {
        dc += p_.batch_strides[axis];
        if (++index[axis] < p_.batch_shape[axis]) break;
        dc -= p_.batch_shape[axis] * p_.batch_strides[axis];
        index[axis] = 0;
      }
      more = axis >= 0;
    }
    AscendC::Adds(acc, acc, 0.0f, TILE_N);
    VectorBarrier();
    StoreLine(out, acc, columns, p_.out_stride, p_.out_dtype);
  }

  __aicore__ inline void FetchRows(Layout layout, uint64_t dc, int64_t row, int32_t depth, int32_t columns) {
    Fetch(layout, dc + row * p_.row_stride, static_cast<int32_t>(Smaller(depth, p_.rows - row)), columns, p_.row_stride,
          p_.col_stride, SizeOf(p_.dtype));
  }

  // The rows of one batch index.
  __aicore__ inline void AddRows(const AscendC::LocalTensor<float>& acc, uint64_t dc, int32_t columns) {
    const int32_t size = SizeOf(p_.dtype);
    const Layout layout = p_.col_stride == size ? ADJACENT : SPREAD;
    const int32_t depth = PieceDepth(layout, size);
    FetchRows(layout, dc, 0, depth, columns);
    for (int64_t row = 0; row < p_.rows; row += depth) {
      if (row + depth < p_.rows) FetchRows(layout, dc, row + depth, depth, columns);
      const int32_t here = static_cast<int32_t>(Smaller(depth, p_.rows - row));
      AscendC::LocalTensor<uint8_t> hold;
      AscendC::LocalTensor<float> values = upcast_.Get<float>();
      int32_t width = RoundUp(columns, 8);
      if (size == 4) {
        values = Take32(layout, here, columns, hold);
      } else {
        width = RoundUp(columns, 16);
        Upcast(values, Take16(layout, here, columns, hold), p_.dtype, here * width);
        VectorBarrier();
      }
      for (int32_t k = 0; k < here; ++k) {
        AscendC::Add(acc, acc, values[k * width], columns);
        VectorBarrier();
      }
      pieces_.FreeTensor(hold);
    }
  }

  const SumParams& p_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> accumulators_, upcast_;
};

template <int32_t CONTRACT, int32_t DTYPE>
__global__ __aicore__ void gemm_kernel(GemmParams params) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Gemm<CONTRACT, DTYPE> gemm(params);
  gemm.Process();
}

__global__ __aicore__ void column_sum_kernel(SumParams params) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ColumnSum sum(params);
  sum.Process();
}

namespace {

constexpr uint64_t OFFERS = offer(DETKERN_FMA, DETKERN_F16) | offer(DETKERN_FMA, DETKERN_BF16) |
                            offer(DETKERN_TREE, DETKERN_F16) | offer(DETKERN_TREE, DETKERN_BF16);

int32_t failed(const char* what, aclError error) {
  const int32_t status = error == ACL_ERROR_RT_MEMORY_ALLOCATION ? DETKERN_OUT_OF_MEMORY : DETKERN_DEVICE_FAULT;
  const char* said = aclGetRecentErrMsg();
  return fail(status, "%s: error %d%s%.300s", what, static_cast<int>(error), said ? ": " : "", said ? said : "");
}

// Whoever loads the library without a framework has initialised nothing yet.
aclError initialise() {
  static const aclError error = [] {
    const aclError first = aclInit(nullptr);
    return first == ACL_ERROR_REPEAT_INITIALIZE ? ACL_SUCCESS : first;
  }();
  return error;
}

// Makes a device current, and the one before it again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error = initialise();
    if (error != ACL_SUCCESS) return;
    const bool had_one = aclrtGetDevice(&before_) == ACL_SUCCESS;
    if (had_one && before_ == device) return;
    error = aclrtSetDevice(device);
    restore_ = had_one && error == ACL_SUCCESS;
  }
  ~CurrentDevice() {
    if (restore_) aclrtSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  aclError error;

 private:
  int32_t before_ = 0;
  bool restore_ = false;
};

// How many blocks a launch has at most, and that the device computes infinities and NaN.
int32_t prepare(int device, int64_t& cores) {
  if (const aclError error = aclrtGetDeviceInfo(static_cast<uint32_t>(device), ACL_DEV_ATTR_VECTOR_CORE_NUM, &cores))
    return failed("aclrtGetDeviceInfo", error);
  aclrtFloatOverflowMode mode = ACL_RT_OVERFLOW_MODE_UNDEF;
  if (const aclError error = aclrtGetDeviceSatMode(&mode)) return failed("aclrtGetDeviceSatMode", error);
  if (mode != ACL_RT_OVERFLOW_MODE_INFNAN)
    return fail(DETKERN_UNSUPPORTED, "the device saturates on overflow; aclrtSetDeviceSatMode(ACL_RT_OVERFLOW_MODE_INFNAN) "
                                     "before its streams are made gives infinities and NaN");
  return DETKERN_OK;
}

int32_t tree_depth(int64_t leaves) {
  int32_t depth = 0;
  for (; leaves > 1; leaves -= leaves / 2) ++depth;
  return depth;
}

Operand operand(const void* array, int64_t row, int64_t col, const int64_t* batch, int rank, int64_t size) {
  Operand made{};
  made.address = reinterpret_cast<uint64_t>(array);
  made.row = row * size;
  made.col = col * size;
  for (int i = 0; i < rank; ++i) made.batch[i] = batch[i] * size;
  return made;
}

int32_t gemm(const detkern_gemm_descriptor* d) {
  bool empty = true;
  if (const int32_t status = check_gemm(d, OFFERS, empty)) return status;
  if (empty) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  int64_t cores = 0;
  if (const int32_t status = prepare(d->device, cores)) return status;
  GemmParams p{};
  p.m = d->m;
  p.n = d->n;
  p.k = d->k;
  p.batch_rank = d->batch_rank;
  for (int i = 0; i < d->batch_rank; ++i) p.batch_shape[i] = d->batch_shape[i];
  const int64_t out_size = d->out_dtype == DETKERN_F32 ? 4 : 2, bias_size = d->bias_dtype == DETKERN_F32 ? 4 : 2;
  p.a = operand(d->a, d->a_row_stride, d->a_col_stride, d->a_batch_strides, d->batch_rank, 2);
  p.b = operand(d->b, d->b_row_stride, d->b_col_stride, d->b_batch_strides, d->batch_rank, 2);
  p.out = operand(d->out, d->out_row_stride, d->out_col_stride, d->out_batch_strides, d->batch_rank, out_size);
  p.bias = reinterpret_cast<uint64_t>(d->bias);
  p.bias_stride = d->bias_stride * bias_size;
  p.out_dtype = d->out_dtype;
  p.bias_dtype = d->bias_dtype;
  p.accumulate = d->accumulate;
  p.levels = d->contract == DETKERN_TREE ? tree_depth((d->k + LEAF - 1) / LEAF) : 0;
  for (p.rows = MAX_ROWS; p.rows > 1 && p.levels * p.rows * TILE_N * 2 > DETKERN_LEVEL_BYTES;) p.rows /= 2;
  int64_t batch = 1;
  for (int i = 0; i < d->batch_rank; ++i) batch *= d->batch_shape[i];
  p.tiles = batch * ((d->m + p.rows - 1) / p.rows) * ((d->n + TILE_N - 1) / TILE_N);
  const uint32_t blocks = static_cast<uint32_t>(std::min(p.tiles, cores));
  const aclrtStream stream = static_cast<aclrtStream>(d->stream);
  const bool f16 = d->operand_dtype == DETKERN_F16;
  if (d->contract == DETKERN_TREE) {
    const auto kernel = f16 ? gemm_kernel<DETKERN_TREE, DETKERN_F16> : gemm_kernel<DETKERN_TREE, DETKERN_BF16>;
    DETKERN_LAUNCH(kernel, blocks, stream, p);
  } else {
    const auto kernel = f16 ? gemm_kernel<DETKERN_FMA, DETKERN_F16> : gemm_kernel<DETKERN_FMA, DETKERN_BF16>;
    DETKERN_LAUNCH(kernel, blocks, stream, p);
  }
  if (const aclError error = aclrtGetLastError(ACL_RT_THREAD_LEVEL)) return failed("launch of gemm", error);
  return DETKERN_OK;
}

int32_t column_sum(const detkern_column_sum_descriptor* d) {
  SumParams p{};
  if (const int32_t status = check_column_sum(d, p.rows)) return status;
  if (d->n == 0) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  int64_t cores = 0;
  if (const int32_t status = prepare(d->device, cores)) return status;
  const int64_t size = d->operand_dtype == DETKERN_F32 ? 4 : 2, out_size = d->out_dtype == DETKERN_F32 ? 4 : 2;
  p.columns = d->n;
  p.row_stride = d->row_stride * size;
  p.col_stride = d->col_stride * size;
  p.out_stride = d->out_stride * out_size;
  for (int i = 0; i < d->batch_rank; ++i) {
    p.batch_shape[i] = d->batch_shape[i];
    p.batch_strides[i] = d->batch_strides[i] * size;
  }
  p.dc = reinterpret_cast<uint64_t>(d->dc);
  p.out = reinterpret_cast<uint64_t>(d->out);
  p.batch_rank = d->batch_rank;
  p.dtype = d->operand_dtype;
  p.out_dtype = d->out_dtype;
  p.accumulate = d->accumulate;
  const uint32_t blocks = static_cast<uint32_t>(std::min((d->n + TILE_N - 1) / TILE_N, cores));
  DETKERN_LAUNCH(column_sum_kernel, blocks, static_cast<aclrtStream>(d->stream), p);
  if (const aclError error = aclrtGetLastError(ACL_RT_THREAD_LEVEL)) return failed("launch of column_sum", error);
  return DETKERN_OK;
}

int32_t get_device(detkern_device* device) {
  if (!device || device->size != sizeof *device)
    return fail(DETKERN_INVALID, "device struct of another size than this library's %zu", sizeof *device);
  const CurrentDevice current(device->index);
  if (current.error) return failed("aclrtSetDevice", current.error);
  int64_t cores = 0;
  const uint32_t index = static_cast<uint32_t>(device->index);
  if (const aclError error = aclrtGetDeviceInfo(index, ACL_DEV_ATTR_VECTOR_CORE_NUM, &cores))
    return failed("aclrtGetDeviceInfo", error);
  device->units = static_cast<int32_t>(cores);
  const char* name = aclrtGetSocName();
  std::snprintf(device->name, sizeof device->name, "%s", name ? name : "Ascend");
  int32_t major = 0, minor = 0, patch = 0;
  if (const aclError error = aclrtGetVersion(&major, &minor, &patch)) return failed("aclrtGetVersion", error);
  std::snprintf(device->driver, sizeof device->driver, "runtime %d.%d.%d", major, minor, patch);
  return DETKERN_OK;
}

}  // namespace
}  // namespace detkern

extern "C" {

int32_t detkern_abi_version(void) { return DETKERN_ABI_VERSION; }

const char* detkern_last_error(void) { return detkern::last_error; }

int32_t detkern_get_capabilities(detkern_capabilities* capabilities) {
  using namespace detkern;
  last_error[0] = 0;
  if (!capabilities || capabilities->size != sizeof *capabilities)
    return fail(DETKERN_INVALID, "capabilities struct of another size than this library's %zu", sizeof *capabilities);
  capabilities->abi_version = DETKERN_ABI_VERSION;
  capabilities->host_memory = DETKERN_HOST_MEMORY;
  capabilities->gemm_offers = OFFERS;
  std::snprintf(capabilities->name, sizeof capabilities->name, "ascend%s", DETKERN_HOST_MEMORY ? ", emulated" : "");
  return DETKERN_OK;
}

int32_t detkern_gemm(const detkern_gemm_descriptor* descriptor) {
  detkern::last_error[0] = 0;
  return detkern::gemm(descriptor);
}

int32_t detkern_gemm_scratch(const detkern_gemm_descriptor* descriptor, uint64_t* bytes) {
  using namespace detkern;
  last_error[0] = 0;
  *bytes = 0;
  bool empty = true;
  return check_gemm_sizes(descriptor, OFFERS, empty);
}

int32_t detkern_block_scaled_gemm(const detkern_block_scaled_descriptor*) {
  return detkern::fail(DETKERN_UNSUPPORTED, "there is no kernel for fp8-block128 on Ascend");
}

int32_t detkern_column_sum(const detkern_column_sum_descriptor* descriptor) {
  detkern::last_error[0] = 0;
  return detkern::column_sum(descriptor);
}

int32_t detkern_device_count(int32_t* count) {
  using namespace detkern;
  last_error[0] = 0;
  *count = 0;
  if (const aclError error = initialise()) return failed("aclInit", error);
  uint32_t found = 0;
  if (const aclError error = aclrtGetDeviceCount(&found)) return failed("aclrtGetDeviceCount", error);
  *count = static_cast<int32_t>(found);
  return DETKERN_OK;
}

int32_t detkern_get_device(detkern_device* device) {
  detkern::last_error[0] = 0;
  return detkern::get_device(device);
}

int32_t detkern_allocate(int32_t device, uint64_t bytes, void** pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  if (const aclError error = aclrtMalloc(pointer, bytes ? bytes : 1, ACL_MEM_MALLOC_HUGE_FIRST))
    return failed("aclrtMalloc", error);
  return DETKERN_OK;
}

int32_t detkern_free(int32_t device, void* pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  if (const aclError error = aclrtFree(pointer)) return failed("aclrtFree", error);
  return DETKERN_OK;
}

int32_t detkern_copy(int32_t device, void* to, const void* from, uint64_t bytes, int32_t direction) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  if (const aclError error = aclrtSynchronizeDevice()) return failed("aclrtSynchronizeDevice", error);
  const aclrtMemcpyKind kind = direction == DETKERN_TO_DEVICE ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
  if (const aclError error = aclrtMemcpy(to, bytes, from, bytes, kind)) return failed("aclrtMemcpy", error);
  return DETKERN_OK;
}

}  // extern "C"
