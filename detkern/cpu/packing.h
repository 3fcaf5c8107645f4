// Operands to panels: a block of k of some rows or columns, upcast exactly to binary32, in the order the kernels read.
//
// A's rows stay rows (k contiguous, `pitch` floats apart): the kernels broadcast from them. B's columns are gathered
// COLUMNS at a time, so that one k of a panel is COLUMNS adjacent floats. Both come in one of three ways: along a unit
// stride of k, along a unit stride of the other dimension, or element by element. Columns and k past the end are zeros.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "job.h"
#include "simd.h"

namespace detkern {

constexpr int COLUMNS = 2 * LANES;

// Stand-ins for the exponents of zeros and of infinities and NaN in a tensor-core step. Every sum with NONFINITE, that
// of NONFINITE and ZERO too, is above every true exponent; every other sum with ZERO is below; no sum leaves 16 bits.
constexpr int EXPONENT_ZERO = -8000, EXPONENT_NONFINITE = 12000, EXPONENT_NONE = -4000;

// The packed values of rows [0, tile.rows) at target[r * pitch + k], zeros for count <= k < padded.
void pack_rows(const Side& side, const char* source, int rows, int count, int padded, float* target, int pitch);

// The panels of columns [0, columns), `panel_size` floats apart: target[k * COLUMNS + c], zeros past `columns` and
// `count`.
void pack_panels(const Side& side, const char* source, int columns, int count, int padded, float* target,
                 size_t panel_size);

// The tensor-core step's exponents of packed values. Those of rows lie twice in one word, which is what the kernels
// broadcast; those of a panel in the order of narrow_position.
void row_exponents(const float* values, int dtype, int32_t* target, int rows, int count, int pitch);
void panel_exponents(const float* values, int dtype, int16_t* target, int columns, int count, size_t panel_size);

// The packed block that a worker multiplies now. EXPONENTS: with the tensor-core step's exponents beside the values.
template <int BLOCK_K, bool EXPONENTS>
struct Panels {
  // Not multiples of 4096 bytes: rows of one micro tile, and panels written together, do not share a cache set.
  static constexpr int PITCH = BLOCK_K + 16;
  static constexpr size_t PANEL = size_t(BLOCK_K) * COLUMNS + 32;

  bool starts = true;  // the chains begin here, from +0: accumulators in memory are not read
  float* a = nullptr;
  int32_t* a_exponents = nullptr;
  float* b = nullptr;
  int16_t* b_exponents = nullptr;

  static size_t bytes(int rows, int columns) {
    return size_t(rows) * PITCH * (EXPONENTS ? 8 : 4) + size_t(columns / COLUMNS) * PANEL * (EXPONENTS ? 6 : 4);
  }

  // `memory` is aligned to 64 bytes and holds bytes(rows, columns); columns is a multiple of COLUMNS.
  void place(char* memory, int rows, int columns) {
    const auto take = [&memory](size_t size) {
      char* part = memory;
      memory += size;
      return part;
    };
    b = reinterpret_cast<float*>(take(size_t(columns / COLUMNS) * PANEL * 4));
    a = reinterpret_cast<float*>(take(size_t(rows) * PITCH * 4));
    if (EXPONENTS) {
      a_exponents = reinterpret_cast<int32_t*>(take(size_t(rows) * PITCH * 4));
      b_exponents = reinterpret_cast<int16_t*>(take(size_t(columns / COLUMNS) * PANEL * 2));
    }
  }

  const float* panel(int index) const { return b + size_t(index) * PANEL; }
  const int16_t* exponent_panel(int index) const { return b_exponents + size_t(index) * PANEL; }

  // Packs k0 .. k0 + count of the tile's operands; k is padded with zeros to a multiple of `group`.
  void pack(const Job& job, const Tile& tile, int64_t k0, int count, int group) {
    const int padded = (count + group - 1) / group * group;
    pack_rows(job.a, tile.a + k0 * job.a.k_stride, tile.rows, count, padded, a, PITCH);
    pack_panels(job.b, tile.b + k0 * job.b.k_stride, tile.columns, count, padded, b, PANEL);
    if (EXPONENTS) {
      row_exponents(a, job.a.dtype, a_exponents, tile.rows, padded, PITCH);
      panel_exponents(b, job.b.dtype, b_exponents, tile.columns, padded, PANEL);
    }
  }
};

}  // namespace detkern
