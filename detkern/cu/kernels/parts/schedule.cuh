// Which output tile a CTA computes, and where its batch lies.
//
// Every GEMM kernel walks `for (tile = blockIdx.x; tile < tile_count(p); tile += gridDim.x)`, so any grid.x from 1 to
// min(tile count, 2^31 - 1) is right; grid.y and grid.z are 1. The tile count is batch * ceil(m / TILE_M) * ceil(n /
// TILE_N).
#pragma once

#include "parts/params.cuh"

struct OutputTile {
  int64_t batch;  // linear index over batch_shape
  int64_t row;    // of the tile's first element
  int64_t column;
};

// A batch of at most two dimensions by its index in each, as tensor maps have them.
struct BatchIndex {
  int outer, inner;

  BatchIndex() = default;

  // Of at most one dimension.
  DETKERN_INLINE explicit BatchIndex(int64_t batch) : outer(static_cast<int>(batch)), inner(0) {}

  DETKERN_INLINE BatchIndex(const GemmParams& p, int64_t batch) : outer(static_cast<int>(batch)), inner(0) {
    if (p.batch_rank < 2) return;
    const int size = static_cast<int>(p.batch_shape[1]);
    outer = static_cast<int>(batch) / size;
    inner = static_cast<int>(batch) - outer * size;
  }

  // That of an operand, which may be broadcast along either dimension, and of which `shared` indices of the second one
  // have one matrix.
  DETKERN_INLINE BatchIndex of(const GemmParams& p, const int64_t (&strides)[MAX_BATCH_RANK], int shared) const {
    BatchIndex result;
    result.outer = p.batch_rank != 0 && strides[0] != 0 ? outer : 0;
    result.inner = p.batch_rank == 2 && strides[1] != 0 ? inner : 0;
    if (shared != 1) result.inner = static_cast<uint32_t>(result.inner) / static_cast<uint32_t>(shared);
    return result;
  }
};

DETKERN_INLINE int64_t batch_count(const GemmParams& p) {
  int64_t count = 1;
  for (int axis = 0; axis < p.batch_rank; ++axis) count *= p.batch_shape[axis];
  return count;
}

template <int TILE_ROWS, int TILE_COLUMNS>
DETKERN_INLINE int64_t tile_count(const GemmParams& p) {
  return batch_count(p) * ((p.m + TILE_ROWS - 1) / TILE_ROWS) * ((p.n + TILE_COLUMNS - 1) / TILE_COLUMNS);
}

// Bands of BAND_ROWS tile rows, walked column by column: the CTAs that run together share rows of A and columns of B in
// L2.
template <int TILE_ROWS, int TILE_COLUMNS, int BAND_ROWS>
DETKERN_INLINE OutputTile output_tile(const GemmParams& p, int64_t tile) {
  const int64_t tile_rows = (p.m + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t tile_columns = (p.n + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const int64_t batch = tile / (tile_rows * tile_columns);
  const int64_t in_batch = tile - batch * (tile_rows * tile_columns);
  const int64_t band = in_batch / (BAND_ROWS * tile_columns);
  const int64_t in_band = in_batch - band * (BAND_ROWS * tile_columns);
  const int64_t height = min(static_cast<int64_t>(BAND_ROWS), tile_rows - band * BAND_ROWS);
  const int64_t column = in_band / height;
  const int64_t row = band * BAND_ROWS + (in_band - column * height);
  return {batch, row * TILE_ROWS, column * TILE_COLUMNS};
}

// The offset in elements of batch `batch` under `strides` (the last axis runs fastest).
DETKERN_INLINE int64_t batch_offset(const GemmParams& p, const int64_t (&strides)[MAX_BATCH_RANK], int64_t batch) {
  int64_t offset = 0;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    const int64_t outer = batch / p.batch_shape[axis];
    offset += (batch - outer * p.batch_shape[axis]) * strides[axis];
    batch = outer;
  }
  return offset;
}
