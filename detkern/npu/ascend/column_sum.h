// The bias gradient on the vector units of Ascend AI cores: for each column acc = +0 (or out), for rows ascending acc =
// acc + dc[row], binary32, to nearest even; + 0 and one rounding at the end.
//
// Tile     256 columns over all rows, so that no chain is cut. A piece is 16 KB of rows, or two where columns are not
//          adjacent.
// Launch   min(tiles, vector cores) blocks, each walking tiles by GetBlockNum(); any number of blocks is right.
// Memory   of columns.h, and 33 KB: accumulators and a piece in binary32.
#pragma once

#include "columns.h"

namespace detkern {

struct SumParams {
  int64_t rows, columns, row_stride, col_stride, out_stride;
  int64_t batch_shape[DETKERN_MAX_SUM_RANK], batch_strides[DETKERN_MAX_SUM_RANK];
  uint64_t dc, out;
  int32_t batch_rank, dtype, out_dtype, accumulate;
};

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

}  // namespace detkern
