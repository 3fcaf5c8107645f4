// The bias gradient of few rows, column_sum.cu's contract: there a CTA takes as long as its ring needs to fill, here a
// thread reads its columns where they lie. A sum of arrays is one: a single row, added to the output.
//
// Macros   OPERAND (F32 1, F16 2, BF16 3), TILE_N (columns, COLUMNS a thread), THREADS.
// Launch   THREADS threads, grid (min(ceil(n / TILE_N), 2^31 - 1), 1, 1); any smaller grid.x is right as well.
// Memory   No shared memory, no scratch.
// Loads    Any strides and alignment.
#include "parts/column_sum_params.cuh"
#include "parts/elements.cuh"
#include "ptx/memory.cuh"
#include "ptx/types.cuh"

constexpr int COLUMNS = TILE_N / THREADS;
static_assert(TILE_N % THREADS == 0, "as many columns a thread");

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ ColumnSumParams p) {
  using Element = StorageOf<OPERAND>::type;
  for (int64_t first = int64_t(blockIdx.x) * TILE_N + threadIdx.x; first < p.n; first += int64_t(gridDim.x) * TILE_N) {
    float acc[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int64_t column = first + i * THREADS;
      const bool wanted = p.accumulate && column < p.n;
      acc[i] = load_global_if(wanted, static_cast<const float*>(p.out) + column * p.out_stride);
    }
    for (int64_t row = 0; row < p.rows; ++row) {
      const Element* source = static_cast<const Element*>(p.dc) + row_offset(p, row);
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        const int64_t column = first + i * THREADS;
        if (column < p.n) acc[i] = __fadd_rn(acc[i], widened<OPERAND>(source[column * p.col_stride]));
      }
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int64_t column = first + i * THREADS;
      if (column < p.n) store_any(p.out, column * p.out_stride, p.out_dtype, acc[i]);
    }
  }
}
