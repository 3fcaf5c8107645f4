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

template <class T>  // float or const float
inline T* accumulator_row(T* accumulators, int padded_rows, int panel, int row) {
  return accumulators + (size_t(panel) * padded_rows + row) * COLUMNS;
}

// Reads the float32 `out` as starting accumulators.
void load_out(const Job& job, const Tile& tile, float* accumulators, int padded_rows);

// Adds the float32 `out` to the accumulators, in binary32.
void add_out(const Job& job, const Tile& tile, float* accumulators, int padded_rows);

// Finishes the accumulators and stores them to `out`.
void store_tile(const Job& job, const Tile& tile, const float* accumulators, int padded_rows);

// + 0, NaN canonical, one rounding: `count` results of one row, at `out`. `values` may be read up to a whole vector.
template <int OUT>
void store_row(const float* values, int count, char* out, int64_t stride) {
  int k = 0;
  if (stride == itemsize(OUT))
    for (; k + LANES <= count; k += LANES)
      store_lanes<OUT>(out + k * stride, canonical(load_vector(values + k) + Float{}));
  for (; k < count; ++k) store<OUT>(out + k * stride, canonical(values[k] + 0.0f));
}

}  // namespace detkern
