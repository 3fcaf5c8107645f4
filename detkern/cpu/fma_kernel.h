// The register tile of a chain of fused multiply-adds: acc = fma(a[k], b[k], acc), k ascending, for fma and tree
// leaves.
#pragma once

#include "packing.h"
#include "simd.h"

namespace detkern {

// As many rows as leave registers for one k of B and a broadcast: 12 of 16 accumulators with AVX2, 28 of 32 with
// AVX-512.
constexpr int FMA_TILE_ROWS = LANES == 16 ? 14 : 6;

template <int R, class Block>
inline void fma_chain(const Block& block, int row, int panel, int first_k, int count, Float (&acc)[R][2]) {
  const float* a = block.a + size_t(row) * Block::PITCH + first_k;
  const float* b = block.panel(panel) + first_k * COLUMNS;
  for (int k = 0; k < count; ++k) {
    const Float b0 = load_vector(b), b1 = load_vector(b + LANES);
    for (int r = 0; r < R; ++r) {
      const Float x = splat(a[r * Block::PITCH + k]);
      acc[r][0] = fma(x, b0, acc[r][0]);
      acc[r][1] = fma(x, b1, acc[r][1]);
    }
    b += COLUMNS;
  }
}

// The accumulators of a micro tile, or +0 where the chains start.
template <int R>
inline void load_accumulators(bool starts, const float* memory, Float (&acc)[R][2]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = starts ? Float{} : load_vector(memory + r * COLUMNS + v * LANES);
}

template <int R>
inline void store_accumulators(float* memory, const Float (&acc)[R][2]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) store_vector(memory + r * COLUMNS + v * LANES, acc[r][v]);
}

}  // namespace detkern
