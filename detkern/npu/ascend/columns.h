// What the Ascend kernels do with columns: bringing in rows of them at any strides, finishing a line of results and
// storing it.
#pragma once

#include <cstdint>

#include "../../abi/abi.h"
#include "kernel_operator.h"

#include "exact_fma.h"

namespace detkern {

constexpr int32_t LEAF = 32;
constexpr int32_t TILE_N = 256;
constexpr int32_t PIECE_BYTES = LEAF * TILE_N * 2;
constexpr int32_t BLOCK_BYTES = 32;  // what local memory is addressed in
constexpr int32_t SPREAD_K = PIECE_BYTES / (TILE_N * BLOCK_BYTES);

__aicore__ inline int32_t SizeOf(int32_t dtype) { return dtype == DETKERN_F32 ? 4 : 2; }
__aicore__ inline int32_t RoundUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }
__aicore__ inline int64_t Smaller(int64_t x, int64_t y) { return x < y ? x : y; }

// The pipelines' waits.
template <AscendC::HardEvent EVENT>
__aicore__ inline void Order() {
  const int32_t event = static_cast<int32_t>(AscendC::GetTPipePtr()->FetchEventID(EVENT));
  AscendC::SetFlag<EVENT>(event);
  AscendC::WaitFlag<EVENT>(event);
}
__aicore__ inline void VectorBarrier() { AscendC::PipeBarrier<PIPE_V>(); }

// Copies `lines` lines of `bytes` contiguous bytes, `stride` apart, to lines of local memory `pitch` apart, each filled
// with zeros to whole blocks.
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
  __aicore__ static inline void Upcast(const AscendC::LocalTensor<float>& to,
                                       const AscendC::LocalTensor<uint16_t>& from, int32_t dtype, int32_t count) {
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

}  // namespace detkern
