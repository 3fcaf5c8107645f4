// Panels from operands: see packing.h.
#include "packing.h"

#include <algorithm>
#include <cstring>

namespace detkern {
namespace {

constexpr int BLOCK = 64;  // k or rows converted at a time, in the first-level cache

// `count` adjacent elements.
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
      struct {
        float value[256];
      } made;
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

// target[j * target_pitch + i] = source[i * BLOCK + j] for i < LANES, j < LANES.
inline void transpose_square(const float* source, float* target, int64_t target_pitch) {
#if defined(DETKERN_AVX2)
  __m256 row[8], pair[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_load_ps(source + i * BLOCK);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    row[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    row[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
    row[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    row[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(target + i * target_pitch, _mm256_permute2f128_ps(row[i], row[i + 4], 0x20));
    _mm256_storeu_ps(target + (i + 4) * target_pitch, _mm256_permute2f128_ps(row[i], row[i + 4], 0x31));
  }
#else
  for (int j = 0; j < LANES; ++j)
    for (int i = 0; i < LANES; ++i) target[j * target_pitch + i] = source[i * BLOCK + j];
#endif
}

// target[j * target_pitch + i] = source[i * BLOCK + j] for i < rows, j < columns.
inline void transpose(const float* source, int rows, int columns, float* target, int64_t target_pitch) {
  int i = 0;
  for (; i + LANES <= rows; i += LANES) {
    int j = 0;
    for (; j + LANES <= columns; j += LANES)
      transpose_square(source + i * BLOCK + j, target + j * target_pitch + i, target_pitch);
    for (; j < columns; ++j)
      for (int l = 0; l < LANES; ++l) target[j * target_pitch + i + l] = source[(i + l) * BLOCK + j];
  }
  for (; i < rows; ++i)
    for (int j = 0; j < columns; ++j) target[j * target_pitch + i] = source[i * BLOCK + j];
}

template <int DTYPE>
void pack_rows_of(const Side& side, const char* source, int rows, int count, float* target, int pitch) {
  if (side.k_stride == itemsize(DTYPE)) {
    for (int r = 0; r < rows; ++r) upcast<DTYPE>(source + r * side.outer_stride, target + r * pitch, count);
  } else if (side.outer_stride == itemsize(DTYPE)) {
    alignas(64) float lines[LANES * BLOCK];
    for (int r0 = 0; r0 < rows; r0 += BLOCK) {
      const int some_rows = std::min(BLOCK, rows - r0);
      for (int k0 = 0; k0 < count; k0 += LANES) {
        const int some_k = std::min(LANES, count - k0);
        for (int k = 0; k < some_k; ++k)
          upcast<DTYPE>(source + r0 * itemsize(DTYPE) + (k0 + k) * side.k_stride, lines + k * BLOCK, some_rows);
        transpose(lines, some_k, some_rows, target + r0 * pitch + k0, pitch);
      }
    }
  } else {
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < count; ++k)
        target[r * pitch + k] = load<DTYPE>(source + r * side.outer_stride + k * side.k_stride);
  }
}

// Columns that are adjacent: a few panels at once, so that each visit to a row of k reads a run of adjacent lines.
template <int DTYPE>
void pack_adjacent(const Side& side, const char* source, int columns, int count, float* target, size_t panel_size) {
  constexpr int SOME = 4;
  int c = 0;
  for (; c + SOME * COLUMNS <= columns; c += SOME * COLUMNS, target += SOME * panel_size)
    for (int k = 0; k < count; ++k) {
      const char* line = source + c * itemsize(DTYPE) + k * side.k_stride;
      for (int p = 0; p < SOME; ++p)
        upcast<DTYPE>(line + p * COLUMNS * itemsize(DTYPE), target + p * panel_size + k * COLUMNS, COLUMNS);
    }
  for (; c < columns; c += COLUMNS, target += panel_size) {
    const int some = std::min(COLUMNS, columns - c);
    for (int k = 0; k < count; ++k)
      upcast<DTYPE>(source + c * itemsize(DTYPE) + k * side.k_stride, target + k * COLUMNS, some);
  }
}

// One panel whose columns lie apart.
template <int DTYPE>
void pack_panel(const Side& side, const char* source, int columns, int count, float* target) {
  if (side.k_stride == itemsize(DTYPE)) {
    alignas(64) float lines[COLUMNS * BLOCK];
    for (int k0 = 0; k0 < count; k0 += BLOCK) {
      const int some_k = std::min(BLOCK, count - k0);
      for (int c = 0; c < columns; ++c)
        upcast<DTYPE>(source + c * side.outer_stride + k0 * itemsize(DTYPE), lines + c * BLOCK, some_k);
      transpose(lines, columns, some_k, target + k0 * COLUMNS, COLUMNS);
    }
  } else {
    for (int k = 0; k < count; ++k)
      for (int c = 0; c < columns; ++c)
        target[k * COLUMNS + c] = load<DTYPE>(source + c * side.outer_stride + k * side.k_stride);
  }
}

inline Int step_exponents(Float value, int smallest) {
  const Int bits = as_int(value) & 0x7fffffff;
  const Int field = bits >> 23, own = field - 127;
  const Int exponent = (own & (own > smallest)) | (smallest & (own <= smallest));
  const Int zero = bits == 0, nonfinite = field == 255;
  return (exponent & ~(zero | nonfinite)) | (EXPONENT_ZERO & zero) | (EXPONENT_NONFINITE & nonfinite);
}

}  // namespace

void pack_rows(const Side& side, const char* source, int rows, int count, int padded, float* target, int pitch) {
  with_dtype(side.dtype, [&](auto tag) {
    pack_rows_of<decltype(tag)::value>(side, source, rows, count, target, pitch);
  });
  for (int r = 0; r < rows; ++r) std::memset(target + r * pitch + count, 0, size_t(padded - count) * 4);
}

void pack_panels(const Side& side, const char* source, int columns, int count, int padded, float* target,
                 size_t panel_size) {
  const int whole = columns / COLUMNS;
  if (columns % COLUMNS) std::memset(target + whole * panel_size, 0, size_t(count) * COLUMNS * 4);
  with_dtype(side.dtype, [&](auto tag) {
    constexpr int DTYPE = decltype(tag)::value;
    if (side.outer_stride == itemsize(DTYPE))
      return pack_adjacent<DTYPE>(side, source, columns, count, target, panel_size);
    for (int c = 0; c < columns; c += COLUMNS)
      pack_panel<DTYPE>(side, source + c * side.outer_stride, std::min(COLUMNS, columns - c), count,
                        target + c / COLUMNS * panel_size);
  });
  for (int c = 0; c < columns; c += COLUMNS, target += panel_size)
    std::memset(target + count * COLUMNS, 0, size_t(padded - count) * COLUMNS * 4);
}

void row_exponents(const float* values, int dtype, int32_t* target, int rows, int count, int pitch) {
  const int smallest = smallest_exponent(dtype);
  for (int r = 0; r < rows; ++r, values += pitch, target += pitch)
    for (int k = 0; k < count; k += LANES) {  // past `count` they are of old values, and part of no group
      const Int exponent = step_exponents(load_vector(values + k), smallest);
      *reinterpret_cast<Int*>(target + k) = (exponent & 0xffff) | (exponent << 16);
    }
}

void panel_exponents(const float* values, int dtype, int16_t* target, int columns, int count, size_t panel_size) {
  const int smallest = smallest_exponent(dtype);
  for (int c = 0; c < columns; c += COLUMNS, values += panel_size, target += panel_size)
    for (int k = 0; k < count; ++k) {
      const Int low = step_exponents(load_vector(values + k * COLUMNS), smallest);
      const Int high = step_exponents(load_vector(values + k * COLUMNS + LANES), smallest);
      *reinterpret_cast<Short*>(target + k * COLUMNS) = narrow(low, high);
    }
}

}  // namespace detkern
