// Contract `tree`: a mid-split tree over K. Leaves of 32 k (the last may be shorter), each a chain of binary32 fused
// multiply-adds from +0 rounded once to the operand type; a node is left + right, rounded to the operand type. CUDA
// cores; f16 and bf16 operands. merge.cuh has the tree.
//
// Macros   OPERAND (F16 2, BF16 3), LOAD_A, LOAD_B (STRIDED 0, K_MAJOR 1, MN_MAJOR 2), TILE_M, TILE_N, TILE_K, WARPS_M,
//          WARPS_N, THREADS = 32 * WARPS_M * WARPS_N, CTAS_PER_SM (a register bound), SHARED_LEVELS, SMEM_BYTES, STAGES
//          = 2.
// Tile     TILE_M x TILE_N outputs; TILE_M a multiple of 16 * WARPS_M, TILE_N of 32 * WARPS_N, TILE_K 8, 16 or 32.
// Launch   THREADS threads, grid (min(tiles, CTAS_PER_SM * multiprocessors), 1, 1) with tiles = batch * ceil(m /
//          TILE_M) * ceil(n / TILE_N): CTAs walk tiles, which bounds the scratch; any grid.x >= 1 is right as well.
// Memory   SMEM_BYTES = 8 * TILE_K * (TILE_M + TILE_N) + SHARED_LEVELS * TILE_M * TILE_N * 2 of dynamic shared memory:
//          two stages in binary32 and the lowest levels of waiting children. Scratch, 16-byte aligned and not
//          initialised: grid.x * max(0, ceil(log2(max(1, ceil(k / 32)))) - SHARED_LEVELS) * TILE_M * TILE_N * 2 bytes.
// Loads    K_MAJOR and MN_MAJOR want the pointer, the line stride and the batch strides of the operand at multiples of
//          16 bytes; a line may end anywhere.
#include "parts/epilogue.cuh"
#include "parts/merge.cuh"
#include "parts/params.cuh"
#include "parts/simt.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

using Layout = ThreadLayout<TILE_M, TILE_N, WARPS_M, WARPS_N>;
using MainLoop = SimtMainLoop<OPERAND, LOAD_A, LOAD_B, 2, TILE_K, Layout, TILE_M, TILE_N, THREADS>;
constexpr int BAND = 16;
constexpr int LEAF = 32;
constexpr int WORDS = Layout::THREAD_M * Layout::THREAD_N / 2;
using Stack = MergeStack<OPERAND, WORDS, SHARED_LEVELS, THREADS>;
static_assert(THREADS == 32 * WARPS_M * WARPS_N && STAGES == 2 && LEAF % TILE_K == 0, "geometry");
static_assert(SMEM_BYTES == MainLoop::SHARED_BYTES + SHARED_LEVELS * Stack::LEVEL_BYTES, "shared memory");

DETKERN_INLINE void write_output(const GemmParams& p, int64_t tile, const uint32_t (&root)[WORDS]) {
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
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = root[(m * Layout::THREAD_N + n + i) / 2];
        values[i] = __fadd_rn(i % 2 == 0 ? upcast_low<OPERAND>(pair) : upcast_high<OPERAND>(pair),
                              epilogue.initial(row + Layout::row(m), column + Layout::column(n) + i));
      }
      epilogue.store(row + Layout::row(m), column + Layout::column(n), values, bias);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(16) char shared[];
  // The count is computed again for every tile, since it would be held in registers through the main loop otherwise.
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(*forgotten(&p)); tile += gridDim.x) {
    uint32_t value[WORDS] = {};
    if (p.k > 0) {
      const OutputTile target = output_tile<TILE_M, TILE_N, BAND>(p, tile);
      MainLoop loop(p, batch_offset(p, p.a_batch, target.batch), batch_offset(p, p.b_batch, target.batch), target.row,
                    target.column, shared_address(shared));
      const uint32_t leaves = static_cast<uint32_t>((p.k + LEAF - 1) / LEAF);
      Stack stack(leaves, shared_address(shared) + MainLoop::SHARED_BYTES, p.scratch);
      int64_t whole = p.k / TILE_K;  // tiles still to come
      bool tail = p.k % TILE_K != 0;
      if (whole > 0) loop.start(whole);
      while (whole > 0 || tail) {
        MainLoop::Accumulators acc = {};
        int tiles_of_leaf = 0;
        for (; tiles_of_leaf < LEAF / TILE_K && whole > 0; ++tiles_of_leaf) loop.advance(acc, --whole);
        if (tiles_of_leaf < LEAF / TILE_K && tail) {
          loop.finish(acc, p.k);
          tail = false;
        }
#pragma unroll
        for (int m = 0; m < Layout::THREAD_M; ++m) {
#pragma unroll
          for (int n = 0; n < Layout::THREAD_N; n += 2) {
            value[(m * Layout::THREAD_N + n) / 2] = round_pair<OPERAND>(acc[m][n], acc[m][n + 1]);
          }
        }
        stack.push(value);
      }
      __syncthreads();  // before the next tile reuses the stages
    }
    forget(tile);  // so that nothing of the epilogue is computed early and held in registers through the main loop
    write_output(p, tile, value);
  }
}
