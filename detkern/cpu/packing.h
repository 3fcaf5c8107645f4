// Operands to panels: a block of k of some rows or columns, upcast exactly to binary32, in the order the kernels read.
//
// A's rows stay rows (k contiguous, `pitch` floats apart): the kernels broadcast from them. B's columns are gathered COLUMNS
// at a time, so that one k of a panel is COLUMNS adjacent floats. Both come in one of three ways: along a unit stride of k,
// along a unit stride of the other dimension, or element by element. Columns and k past the end are zeros.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "job.h"
#include "simd.h"

namespace detkern {

constexpr int COLUMNS = 2 * LANES;

// Stand-ins for the exponents of zeros and of infinities and NaN in a tensor-core step. Every sum with NONFINITE, that of
// NONFINITE and ZERO too, is above every true exponent; every other sum with ZERO is below; no sum leaves 16 bits.
constexpr int EXPONENT_ZERO = -8000, EXPONENT_NONFINITE = 12000, EXPONENT_NONE = -4000;

template <int DTYPE>
inline void upcast(const char* source, float* target, int64_t count) {
  int64_t i = 0;
  if constexpr (DTYPE == DETKERN_F32) {
    std::memcpy(target, source, size_t(count) * 4);
    return;
  }
  if constexpr (DTYPE == DETKERN_F16) {
    for (; i + LANES <= count; i += LANES) {
      const Float values = load_f16(source + 2 * i);
      std::memcpy(target + i, &values, sizeof values);
    }
  }
  if constexpr (DTYPE == DETKERN_E4M3 || DTYPE == DETKERN_E5M2) {
    static const auto table = [] {
      struct { float value[256]; } made;
      for (int byte = 0; byte < 256; ++byte) {
        const char raw = char(byte);
        made.value[byte] = load<DTYPE>(&raw);
      }
      return made;
    }();
    for (; i < count; ++i) target[i] = table.value[uint8_t(source[i])];
    return;
  }
  for (; i < count; ++i) target[i] = load<DTYPE>(source + itemsize(DTYPE) * i);
}

// target[r * pitch + k] for r < rows, k < count; zeros up to padded_count.
template <int DTYPE>
void pack_rows(const Side& side, const char* source, int rows, int count, float* target, int pitch, int padded_count) {
  constexpr int BLOCK = 64;
  if (side.k_stride == itemsize(DTYPE)) {
    for (int r = 0; r < rows; ++r) upcast<DTYPE>(source + r * side.outer_stride, target + r * pitch, count);
  } else if (side.outer_stride == itemsize(DTYPE)) {
    float line[BLOCK];
    for (int r0 = 0; r0 < rows; r0 += BLOCK) {
      const int some = std::min(BLOCK, rows - r0);
      for (int k = 0; k < count; ++k) {
        upcast<DTYPE>(source + r0 * itemsize(DTYPE) + k * side.k_stride, line, some);
        for (int r = 0; r < some; ++r) target[(r0 + r) * pitch + k] = line[r];
      }
    }
  } else {
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < count; ++k)
        target[r * pitch + k] = load<DTYPE>(source + r * side.outer_stride + k * side.k_stride);
  }
  for (int r = 0; r < rows; ++r) std::memset(target + r * pitch + count, 0, size_t(padded_count - count) * 4);
}

// target[k * COLUMNS + c] for c < columns <= COLUMNS, k < count; zeros up to COLUMNS and padded_count.
template <int DTYPE>
void pack_panel(const Side& side, const char* source, int columns, int count, float* target, int padded_count) {
  if (columns < COLUMNS) std::memset(target, 0, size_t(count) * COLUMNS * 4);
  if (side.outer_stride == itemsize(DTYPE)) {
    if (columns == COLUMNS)
      for (int k = 0; k < count; ++k) upcast<DTYPE>(source + k * side.k_stride, target + k * COLUMNS, COLUMNS);
    else
      for (int k = 0; k < count; ++k) upcast<DTYPE>(source + k * side.k_stride, target + k * COLUMNS, columns);
  } else if (side.k_stride == itemsize(DTYPE)) {
    constexpr int BLOCK = 64;
    alignas(64) float lines[COLUMNS][BLOCK];
    for (int k0 = 0; k0 < count; k0 += BLOCK) {
      const int some = std::min(BLOCK, count - k0);
      for (int c = 0; c < columns; ++c)
        upcast<DTYPE>(source + c * side.outer_stride + k0 * itemsize(DTYPE), lines[c], some);
      for (int k = 0; k < some; ++k)
        for (int c = 0; c < columns; ++c) target[(k0 + k) * COLUMNS + c] = lines[c][k];
    }
  } else {
    for (int k = 0; k < count; ++k)
      for (int c = 0; c < columns; ++c)
        target[k * COLUMNS + c] = load<DTYPE>(source + c * side.outer_stride + k * side.k_stride);
  }
  std::memset(target + count * COLUMNS, 0, size_t(padded_count - count) * COLUMNS * 4);
}

inline Int step_exponents(Float value, int smallest) {
  const Int bits = as_int(value) & 0x7fffffff;
  const Int field = bits >> 23;
  const Int own = field - 127;
  const Int small = splat_int(smallest);
  Int exponent = (own & (own > small)) | (small & (own <= small));
  const Int zero = bits == 0, nonfinite = field == 255;
  exponent = (exponent & ~(zero | nonfinite)) | (splat_int(EXPONENT_ZERO) & zero);
  return exponent | (splat_int(EXPONENT_NONFINITE) & nonfinite);
}

// Each exponent twice in one word, which is what the kernels broadcast.
inline void row_exponents(const float* values, int smallest, int32_t* target, int count) {
  for (int k = 0; k < count; k += LANES) {
    const Int exponent = step_exponents(load_vector(values + k), smallest);
    *reinterpret_cast<Int*>(target + k) = (exponent & 0xffff) | (exponent << 16);
  }
}

inline void panel_exponents(const float* values, int smallest, int16_t* target, int count) {
  for (int k = 0; k < count; ++k) {
    const Int low = step_exponents(load_vector(values + k * COLUMNS), smallest);
    const Int high = step_exponents(load_vector(values + k * COLUMNS + LANES), smallest);
    *reinterpret_cast<Short*>(target + k * COLUMNS) = narrow(low, high);
  }
}

// The packed block that a worker multiplies now. EXPONENTS: with the tensor-core step's exponents beside the values.
template <int BLOCK_K, bool EXPONENTS>
struct Panels {
  // Not a multiple of 4096 bytes, so that the rows of one micro tile do not share a cache set.
  static constexpr int PITCH = BLOCK_K + 16;

  float* a = nullptr;
  int32_t* a_exponents = nullptr;
  float* b = nullptr;
  int16_t* b_exponents = nullptr;

  static size_t bytes(int rows, int columns) {
    return size_t(rows) * PITCH * (EXPONENTS ? 8 : 4) + size_t(columns) * BLOCK_K * (EXPONENTS ? 6 : 4);
  }

  // `memory` is aligned to 64 bytes and holds bytes(rows, columns); columns is a multiple of COLUMNS.
  void place(char* memory, int rows, int columns) {
    const auto take = [&memory](size_t size) {
      char* part = memory;
      memory += size;
      return part;
    };
    b = reinterpret_cast<float*>(take(size_t(columns) * BLOCK_K * 4));
    a = reinterpret_cast<float*>(take(size_t(rows) * PITCH * 4));
    if (EXPONENTS) {
      a_exponents = reinterpret_cast<int32_t*>(take(size_t(rows) * PITCH * 4));
      b_exponents = reinterpret_cast<int16_t*>(take(size_t(columns) * BLOCK_K * 2));
    }
  }

  const float* panel(int index) const { return b + size_t(index) * BLOCK_K * COLUMNS; }
  const int16_t* exponent_panel(int index) const { return b_exponents + size_t(index) * BLOCK_K * COLUMNS; }

  // Packs k0 .. k0 + count of the tile's operands; k is padded with zeros to a multiple of `group`.
  void pack(const Job& job, const Tile& tile, int64_t k0, int count, int group) {
    const int padded = (count + group - 1) / group * group;
    with_dtype(job.a.dtype, [&](auto tag) {
      pack_rows<decltype(tag)::value>(job.a, tile.a + k0 * job.a.k_stride, tile.rows, count, a, PITCH, padded);
    });
    with_dtype(job.b.dtype, [&](auto tag) {
      for (int c = 0; c < tile.columns; c += COLUMNS)
        pack_panel<decltype(tag)::value>(job.b, tile.b + k0 * job.b.k_stride + c * job.b.outer_stride,
                                         std::min(COLUMNS, tile.columns - c), count, b + size_t(c) * BLOCK_K, padded);
    });
    if (EXPONENTS) {
      const int a_smallest = smallest_exponent(job.a.dtype), b_smallest = smallest_exponent(job.b.dtype);
      for (int r = 0; r < tile.rows; ++r) row_exponents(a + r * PITCH, a_smallest, a_exponents + r * PITCH, padded);
      for (int c = 0; c < tile.columns; c += COLUMNS)
        panel_exponents(b + size_t(c) * BLOCK_K, b_smallest, b_exponents + size_t(c) * BLOCK_K, padded);
    }
  }
};

}  // namespace detkern
