// From finished accumulators to `out`: +0, bias in binary32, one rounding to nearest even; NaN canonical after each.
//
// A tile's accumulators lie in micro tiles [panel][row][COLUMNS], so that a micro kernel's are adjacent.
#pragma once

#include <algorithm>
#include <cstdint>

#include "job.h"
#include "packing.h"
#include "simd.h"

namespace detkern {

inline float* accumulator_row(float* accumulators, int padded_rows, int panel, int row) {
  return accumulators + (size_t(panel) * padded_rows + row) * COLUMNS;
}

// Reads the float32 `out` as starting accumulators, or adds it to them (trees).
template <bool ADD>
void load_out(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  for (int c = 0; c < tile.columns; ++c)
    for (int r = 0; r < tile.rows; ++r) {
      const float value = load_raw<float>(tile.out + r * job.out_row_stride + c * job.out_col_stride);
      float& slot = accumulator_row(accumulators, padded_rows, c / COLUMNS, r)[c % COLUMNS];
      slot = ADD ? slot + value : value;
    }
}

template <int OUT>
void store_tile_as(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  for (int c0 = 0; c0 < tile.columns; c0 += COLUMNS) {
    const int columns = std::min(COLUMNS, tile.columns - c0);
    alignas(64) float bias[COLUMNS] = {};
    const bool has_bias = job.bias.data != nullptr;
    const char* bias_data = job.bias.data + (job.bias.along_rows ? tile.row : tile.column + c0) * job.bias.stride;
    if (has_bias && !job.bias.along_rows)
      with_dtype(job.bias.dtype, [&](auto tag) {
        for (int c = 0; c < columns; ++c) bias[c] = load<decltype(tag)::value>(bias_data + c * job.bias.stride);
      });
    for (int r = 0; r < tile.rows; ++r) {
      float* values = accumulator_row(accumulators, padded_rows, c0 / COLUMNS, r);
      if (has_bias && job.bias.along_rows)
        with_dtype(job.bias.dtype, [&](auto tag) {
          std::fill_n(bias, COLUMNS, load<decltype(tag)::value>(bias_data + r * job.bias.stride));
        });
      for (int c = 0; c < COLUMNS; c += LANES) {
        Float value = canonical(load_vector(values + c) + Float{});
        if (has_bias) value = canonical(value + load_vector(bias + c));
        store_vector(values + c, value);
      }
      char* out = tile.out + r * job.out_row_stride + c0 * job.out_col_stride;
      if (job.out_col_stride == itemsize(OUT) && columns == COLUMNS)
        for (int c = 0; c < COLUMNS; ++c) store<OUT>(out + c * itemsize(OUT), values[c]);
      else
        for (int c = 0; c < columns; ++c) store<OUT>(out + c * job.out_col_stride, values[c]);
    }
  }
}

inline void store_tile(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  switch (job.out_dtype) {
    case DETKERN_F32: return store_tile_as<DETKERN_F32>(job, tile, accumulators, padded_rows);
    case DETKERN_F16: return store_tile_as<DETKERN_F16>(job, tile, accumulators, padded_rows);
    default: return store_tile_as<DETKERN_BF16>(job, tile, accumulators, padded_rows);
  }
}

}  // namespace detkern
