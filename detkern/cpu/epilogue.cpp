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

// The bias of `count` columns or rows from `first` on, in binary32.
void load_bias(const Bias& bias, int64_t first, int count, float* target) {
  const char* source = bias.data + first * bias.stride;
  with_dtype(bias.dtype, [&](auto tag) {
    for (int i = 0; i < count; ++i) target[i] = load<decltype(tag)::value>(source + i * bias.stride);
  });
}

template <int OUT>
void store_tile_as(const Job& job, const Tile& tile, const float* accumulators, int padded_rows) {
  const bool has_bias = job.bias.data != nullptr, along_rows = job.bias.along_rows;
  alignas(64) float bias[MAX_TILE_SIDE];
  if (has_bias && along_rows) load_bias(job.bias, tile.row, tile.rows, bias);
  if (has_bias && !along_rows) load_bias(job.bias, tile.column, tile.columns, bias);

  // COLUMNS elements of row r from column c0 on. Past the tile's last column the bias is stale, and nothing is stored.
  const auto finish = [&](int r, int c0) {
    const float* values = accumulator_row(accumulators, padded_rows, c0 / COLUMNS, r);
    alignas(64) float finished[COLUMNS];
    for (int c = 0; c < COLUMNS; c += LANES) {
      Float value = canonical(load_vector(values + c) + Float{});
      if (has_bias) value = canonical(value + (along_rows ? splat(bias[r]) : load_vector(bias + c0 + c)));
      store_vector(finished + c, value);
    }
    char* out = tile.out + r * job.out_row_stride + c0 * job.out_col_stride;
    const int columns = std::min(COLUMNS, tile.columns - c0);
    if (job.out_col_stride == itemsize(OUT) && columns == COLUMNS)
      for (int c = 0; c < COLUMNS; c += LANES) store_lanes<OUT>(out + c * itemsize(OUT), load_vector(finished + c));
    else
      for (int c = 0; c < columns; ++c) store<OUT>(out + c * job.out_col_stride, finished[c]);
  };
  if (job.out_col_stride == itemsize(OUT)) {  // whole rows, so that stores run through adjacent lines
    for (int r = 0; r < tile.rows; ++r)
      for (int c0 = 0; c0 < tile.columns; c0 += COLUMNS) finish(r, c0);
  } else {
    for (int c0 = 0; c0 < tile.columns; c0 += COLUMNS)
      for (int r = 0; r < tile.rows; ++r) finish(r, c0);
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

void store_tile(const Job& job, const Tile& tile, const float* accumulators, int padded_rows) {
  switch (job.out_dtype) {
    case DETKERN_F32: return store_tile_as<DETKERN_F32>(job, tile, accumulators, padded_rows);
    case DETKERN_F16: return store_tile_as<DETKERN_F16>(job, tile, accumulators, padded_rows);
    default: return store_tile_as<DETKERN_BF16>(job, tile, accumulators, padded_rows);
  }
}

}  // namespace detkern
