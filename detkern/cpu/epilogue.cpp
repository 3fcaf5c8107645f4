// The epilogue: see epilogue.h.
#include "epilogue.h"

#include <algorithm>

#include "packing.h"

namespace detkern {
namespace {

// visit(accumulator, address in out) for every element of a float32 tile.
template <class Visit>
inline void each_element(const Job& job, const Tile& tile, float* accumulators, int padded_rows, const Visit& visit) {
  for (int c0 = 0; c0 < tile.columns; c0 += COLUMNS)
    for (int r = 0; r < tile.rows; ++r) {
      float* values = accumulator_row(accumulators, padded_rows, c0 / COLUMNS, r);
      const char* out = tile.out + r * job.out_row_stride + c0 * job.out_col_stride;
      const int columns = std::min(COLUMNS, tile.columns - c0);
      for (int c = 0; c < columns; ++c) visit(values[c], out + c * job.out_col_stride);
    }
}

template <int OUT>
void store_tile_as(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  const bool has_bias = job.bias.data != nullptr;
  for (int c0 = 0; c0 < tile.columns; c0 += COLUMNS) {
    const int columns = std::min(COLUMNS, tile.columns - c0);
    alignas(64) float bias[COLUMNS] = {};
    if (has_bias && !job.bias.along_rows)
      with_dtype(job.bias.dtype, [&](auto tag) {
        const char* source = job.bias.data + (tile.column + c0) * job.bias.stride;
        for (int c = 0; c < columns; ++c) bias[c] = load<decltype(tag)::value>(source + c * job.bias.stride);
      });
    for (int r = 0; r < tile.rows; ++r) {
      float* values = accumulator_row(accumulators, padded_rows, c0 / COLUMNS, r);
      if (has_bias && job.bias.along_rows)
        with_dtype(job.bias.dtype, [&](auto tag) {
          const char* source = job.bias.data + (tile.row + r) * job.bias.stride;
          std::fill_n(bias, COLUMNS, load<decltype(tag)::value>(source));
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

}  // namespace

void load_out(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  each_element(job, tile, accumulators, padded_rows,
               [](float& value, const char* out) { value = load_raw<float>(out); });
}

void add_out(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  each_element(job, tile, accumulators, padded_rows,
               [](float& value, const char* out) { value += load_raw<float>(out); });
}

void store_tile(const Job& job, const Tile& tile, float* accumulators, int padded_rows) {
  switch (job.out_dtype) {
    case DETKERN_F32: return store_tile_as<DETKERN_F32>(job, tile, accumulators, padded_rows);
    case DETKERN_F16: return store_tile_as<DETKERN_F16>(job, tile, accumulators, padded_rows);
    default: return store_tile_as<DETKERN_BF16>(job, tile, accumulators, padded_rows);
  }
}

}  // namespace detkern
