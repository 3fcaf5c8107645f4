// From the warps' fragments of an output tile to global memory, for the tensor-core kernels.
//
// Each warp moves a slab of 16 rows at a time through shared memory, so that neighbouring lanes finish neighbouring columns
// (or rows, where the output's columns are what is contiguous) and write whole sectors.
#pragma once

#include "epilogue.cuh"

template <int EXTENT_M, int EXTENT_N>
class FragmentStore {
 public:
  static constexpr int PITCH = EXTENT_N + 8;  // floats; eight more keep the fragments' pairs free of bank conflicts
  static constexpr int BYTES = 16 * PITCH * 4;  // of shared memory, for one warp

  // `slab`: this warp's BYTES of shared memory, 16-byte aligned. row, column: the first of the warp's outputs.
  DETKERN_INLINE FragmentStore(const Epilogue& epilogue, float* slab, int64_t row, int64_t column, bool columns_contiguous)
      : epilogue_(epilogue), slab_(slab), row_(row), column_(column), transposed_(columns_contiguous) {}

  // Finishes 16 rows, the block-th of the warp. fragment[j] are the accumulators of columns 8 * j to 8 * j + 7 as
  // mma.sync gives them: rows g and g + 8, columns 2t and 2t + 1 (g = lane / 4, t = lane % 4).
  DETKERN_INLINE void operator()(int block, const float (&fragment)[EXTENT_N / 8][4]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < EXTENT_N / 8; ++j) {
      float* pair = slab_ + lane / 4 * PITCH + j * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(pair) = make_float2(fragment[j][0], fragment[j][1]);
      *reinterpret_cast<float2*>(pair + 8 * PITCH) = make_float2(fragment[j][2], fragment[j][3]);
    }
    __syncwarp();
    if (transposed_) {
      by_columns(row_ + 16 * block, lane);
    } else {
      by_rows(row_ + 16 * block, lane);
    }
  }

 private:
  DETKERN_INLINE void by_rows(int64_t first, int lane) const {
    constexpr int LANES = EXTENT_N / 4;  // for one row, four columns each
    const int column = lane % LANES * 4;
    float bias[4];
    epilogue_.load_bias(column_ + column, bias);
#pragma unroll 1
    for (int row = lane / LANES; row < 16; row += 32 / LANES) {
      const float4 four = *reinterpret_cast<const float4*>(slab_ + row * PITCH + column);
      const float values[4] = {four.x, four.y, four.z, four.w};
      epilogue_.store(first + row, column_ + column, values, bias);
    }
  }

  DETKERN_INLINE void by_columns(int64_t first, int lane) const {
#pragma unroll 1
    for (int column = lane / 16; column < EXTENT_N; column += 2) {
      float bias[1];
      epilogue_.load_bias(column_ + column, bias);
      const float values[1] = {slab_[lane % 16 * PITCH + column]};
      epilogue_.store(first + lane % 16, column_ + column, values, bias);
    }
  }

  const Epilogue& epilogue_;
  float* slab_;
  int64_t row_;
  int64_t column_;
  bool transposed_;
};
