// Contract `fma`: each output is one chain acc = fma(a[k], b[k], acc), binary32, k ascending from 0 to K - 1, from +0
// (or from `out`), on CUDA cores. f32, f16 and bf16 operands; no K is ever split, so no tile, grid or load changes a
// bit.
//
// Macros   OPERAND (F32 1, F16 2, BF16 3), LOAD_A, LOAD_B (STRIDED 0, K_MAJOR 1, MN_MAJOR 2), TILE_M, TILE_N, TILE_K,
//          WARPS_M, WARPS_N, THREADS = 32 * WARPS_M * WARPS_N, CTAS_PER_SM (a register bound), SMEM_BYTES, STAGES = 2.
// Tile     TILE_M x TILE_N outputs; TILE_M a multiple of 16 * WARPS_M, TILE_N of 32 * WARPS_N, TILE_K 8, 16 or 32.
// Launch   THREADS threads, grid (min(tiles, 2^31 - 1), 1, 1) with tiles = batch * ceil(m / TILE_M) * ceil(n / TILE_N):
//          one tile a CTA; any smaller grid.x is right as well.
// Memory   SMEM_BYTES = 8 * TILE_K * (TILE_M + TILE_N) of dynamic shared memory (two stages in binary32); no scratch.
// Loads    K_MAJOR and MN_MAJOR want the pointer, the line stride and the batch strides of the operand at multiples of
//          16 bytes; a line may end anywhere.
#include "parts/epilogue.cuh"
#include "parts/params.cuh"
#include "parts/simt.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"

using Layout = ThreadLayout<TILE_M, TILE_N, WARPS_M, WARPS_N>;
// As measured on an H200 with the largest tile; the small ones have no registers to spare.
constexpr int AHEAD = OPERAND == F32 || (LOAD_A == K_MAJOR && LOAD_B == K_MAJOR) || CTAS_PER_SM > 2 ? 1 : 2;
using MainLoop = SimtMainLoop<OPERAND, LOAD_A, LOAD_B, AHEAD, TILE_K, Layout, TILE_M, TILE_N, THREADS>;
static_assert(THREADS == 32 * WARPS_M * WARPS_N && STAGES == 2, "geometry");
static_assert(SMEM_BYTES == MainLoop::SHARED_BYTES, "shared memory");

constexpr int BAND = 16;

DETKERN_INLINE void read_output(const GemmParams& p, int64_t tile, MainLoop::Accumulators& acc) {
#pragma unroll
  for (int m = 0; m < Layout::THREAD_M; ++m) {
#pragma unroll
    for (int n = 0; n < Layout::THREAD_N; ++n) acc[m][n] = 0.0f;
  }
  if (!p.accumulate) return;
  const OutputTile target = output_tile<TILE_M, TILE_N, BAND>(p, tile);
  const int thread = thread_index();
  const int64_t row = target.row + Layout::first_row(thread), column = target.column + Layout::first_column(thread);
  const int rows = static_cast<int>(min(p.m - row, int64_t(TILE_M)));
  const int columns = static_cast<int>(min(p.n - column, int64_t(TILE_N)));
  // Each address comes from the one before: all of them would not fit the registers beside the accumulators.
  const float* line = static_cast<const float*>(p.out) + batch_offset(p, p.out_batch, target.batch) + row * p.out_row +
                      column * p.out_col;
#pragma unroll
  for (int m = 0; m < Layout::THREAD_M; ++m) {
    const float* source = line;
#pragma unroll
    for (int n = 0; n < Layout::THREAD_N; ++n) {
      acc[m][n] = load_global_if(Layout::row(m) < rows && Layout::column(n) < columns, source);
      source += (Layout::column(n + 1) - Layout::column(n)) * p.out_col;
    }
    line += (Layout::row(m + 1) - Layout::row(m)) * p.out_row;
  }
}

DETKERN_INLINE void write_output(const GemmParams& p, int64_t tile, const MainLoop::Accumulators& acc) {
  const OutputTile target = output_tile<TILE_M, TILE_N, BAND>(p, tile);
  const Epilogue epilogue(p, target.batch);
  const int thread = thread_index();
  const int64_t row = target.row + Layout::first_row(thread), column = target.column + Layout::first_column(thread);
#pragma unroll
  for (int n = 0; n < Layout::THREAD_N; n += 4) {
    float bias[4];
    epilogue.load_bias(column + Layout::column(n), bias);
#pragma unroll
    for (int m = 0; m < Layout::THREAD_M; ++m) {
      const float values[4] = {acc[m][n], acc[m][n + 1], acc[m][n + 2], acc[m][n + 3]};
      epilogue.store(row + Layout::row(m), column + Layout::column(n), values, bias);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(16) char shared[];
  // The count is computed again for every tile, since it would be held in registers through the main loop otherwise.
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(*forgotten(&p)); tile += gridDim.x) {
    MainLoop::Accumulators acc;
    read_output(p, tile, acc);
    if (p.k > 0) {
      const OutputTile target = output_tile<TILE_M, TILE_N, BAND>(p, tile);
      MainLoop loop(p, batch_offset(p, p.a_batch, target.batch), batch_offset(p, p.b_batch, target.batch), target.row,
                    target.column, shared_address(shared));
      const int64_t whole = p.k / TILE_K;
      if (whole > 0) loop.start(whole);
      for (int64_t left = whole - 1; left >= 0; --left) loop.advance(acc, left);
      if (p.k % TILE_K != 0) loop.finish(acc, p.k);
      __syncthreads();  // before the next tile reuses the stages
    }
    forget(tile);  // so that nothing of the epilogue is computed early and held in registers through the main loop
    write_output(p, tile, acc);
  }
}
