// Contract tree-mma16 (mma.sync.m16n8k16, sm_90 and newer), f16 and bf16: leaves of 32 k, two tensor-core steps from +0
// and one rounding to the operand type, merged along the mid-split tree by sums rounded to that type.
//
// Tree. node_walk.cuh's nodes of up to four leaves are merged in registers: `right` gathers the right half of one,
// `left` holds its left half, then the node; MergeLevels has the nodes above. -0 + x is x for every x, so a sum from -0
// adds nothing.
// Tile. As in mma.cu. A leaf's accumulators live only until they are rounded, 8 columns of a warp at a time.
// Launch. 32 * WARPS_M * WARPS_N threads; any grid.x from 1 to min(tile count, 2^31 - 1), best the CTAs that run at
// once.
// Shared memory. SMEM_BYTES = SHARED_LEVELS * 2 * TILE_M * TILE_N + max(STAGES * 2 * (TILE_M + TILE_N) * TILE_K,
//                                                                 WARPS_M * WARPS_N * 64 * (TILE_N / WARPS_N + 8)).
// Scratch. grid.x * max(0, D - SHARED_LEVELS) * 2 * TILE_M * TILE_N bytes, D = max(0, ceil(log2(L)) - 2) and
// L = ceil(k / 32).
// Macros. OPERAND (F16, BF16), LOAD_A, LOAD_B (Load), TILE_M, TILE_N, TILE_K, STAGES, WARPS_M, WARPS_N, SHARED_LEVELS,
// CTAS_PER_SM, SMEM_BYTES.
#include "parts/merge.cuh"
#include "parts/mma_epilogue.cuh"
#include "parts/mma_tile.cuh"
#include "parts/node_walk.cuh"
#include "parts/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_M = TILE_M / WARPS_M;
constexpr int WARP_N = TILE_N / WARPS_N;
constexpr int BLOCKS_M = WARP_M / 16;
constexpr int BLOCKS_N = WARP_N / 8;
constexpr int LEAF_K = 32;
constexpr int STAGE_LEAVES = TILE_K / LEAF_K;
constexpr int BAND = TILE_N > TILE_M ? 16 : 8;  // a wave of CTAs covers about as many rows as columns
constexpr int WORDS = WARP_M * WARP_N / 64;     // of two outputs, a thread
constexpr uint32_t MINUS_ZEROS = 0x80008000u;

using LayoutA = TileLayout<LOAD_A, TILE_M, TILE_K>;
using LayoutB = TileLayout<LOAD_B, TILE_N, TILE_K>;
using CopyA = TileCopy<LOAD_A, TILE_M, TILE_K, THREADS>;
using CopyB = TileCopy<LOAD_B, TILE_N, TILE_K, THREADS>;
using WarpOutput = OutputSlab<WARP_M, WARP_N, WARPS_M>;
using Levels = MergeLevels<OPERAND, WORDS, SHARED_LEVELS, THREADS>;

constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES;
constexpr int SLAB_BYTES = WARPS_M * WARPS_N * WarpOutput::BYTES;
constexpr int LEVELS_AT = STAGES * STAGE_BYTES > SLAB_BYTES ? STAGES * STAGE_BYTES : SLAB_BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_K % LEAF_K == 0 && (TILE_K & (TILE_K - 1)) == 0, "a stage must be a power of two of leaves");
static_assert(WARP_M % 16 == 0 && (WARP_M & (WARP_M - 1)) == 0, "a warp's rows must be a power of two, at least 16");
static_assert(WARP_N % 32 == 0 && (WARP_N & (WARP_N - 1)) == 0, "a warp's columns must be a power of two, at least 32");
static_assert(LayoutA::BYTES % LayoutB::ROW_BYTES == 0, "B's tile must start at a multiple of its rows' size");
static_assert(SMEM_BYTES == LEVELS_AT + SHARED_LEVELS * Levels::LEVEL_BYTES, "shared memory");

DETKERN_INLINE void add_words(uint32_t (&sum)[WORDS], const uint32_t (&other)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) sum[i] = add_pair<OPERAND>(sum[i], other[i]);
}

DETKERN_INLINE void clear_words(uint32_t (&words)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = MINUS_ZEROS;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t first_stage = shared_address(shared);
  const uint32_t last_stage = first_stage + (STAGES - 1) * STAGE_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
  const FragmentA<LayoutA> fragment_a(warp_m, lane);
  const DeepFragmentB<LayoutB> fragment_b(warp_n, lane);
  const uint32_t leaves = static_cast<uint32_t>((p.k + LEAF_K - 1) / LEAF_K);  // no memory holds 2^37 k

  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    const OutputTile output = output_tile<TILE_M, TILE_N, BAND>(p, tile);
    const CopyA copy_a(static_cast<const uint16_t*>(p.a) + batch_offset(p, p.a_batch, output.batch), p.a_row, p.a_col,
                 output.row, p.m, p.k);
    const CopyB copy_b(static_cast<const uint16_t*>(p.b) + batch_offset(p, p.b_batch, output.batch), p.b_col, p.b_row,
                 output.column, p.n, p.k);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
      copy_a.copy(first_stage + stage * STAGE_BYTES, LayoutA{}, stage * TILE_K);
      copy_b.copy(first_stage + stage * STAGE_BYTES + LayoutA::BYTES, LayoutB{}, stage * TILE_K);
      copy_async_commit();
    }

    NodeWalk<4> walk(max(leaves, 1u));
    uint32_t node_leaves = walk.size(), leaf_in_node = 0;
    Levels levels(walk.depth(), first_stage + LEVELS_AT, p.scratch);
    uint32_t left[WORDS], right[WORDS];
    clear_words(left);
    clear_words(right);

    copy_async_wait<STAGES - 1>();
    __syncthreads();
    uint32_t a[2][BLOCKS_M][4], b[2][4];  // [step of the leaf], [parity of the block of columns]
    uint32_t stage = first_stage;
    int leaf_in_stage = 0;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < BLOCKS_M; ++i) fragment_a.load(a[step][i], stage, i, step);
    }
    fragment_b.load(b[0], stage + LayoutA::BYTES, 0, 0);

#pragma unroll 1
    for (uint32_t leaf = 0; leaf < leaves; ++leaf) {
#pragma unroll
      for (int j = 0; j < BLOCKS_N; ++j) {
        const bool last = j == BLOCKS_N - 1;
        if (last) leaf_in_stage = (leaf + 1) % STAGE_LEAVES;
        if (last && leaf_in_stage == 0) {
          copy_async_wait<STAGES - 2>();  // the next stage is complete
          __syncthreads();                // and every thread has read all it needs of this one
          const int64_t k0 = static_cast<int64_t>(leaf / STAGE_LEAVES + STAGES) * TILE_K;
          copy_a.copy(stage, LayoutA{}, k0);  // past the end of K zeros, with nothing read
          copy_b.copy(stage + LayoutA::BYTES, LayoutB{}, k0);
          copy_async_commit();
          stage = stage == last_stage ? first_stage : stage + STAGE_BYTES;
        }
        fragment_b.load(b[(j + 1) % 2], stage + LayoutA::BYTES, (j + 1) % BLOCKS_N, leaf_in_stage);
        float acc[BLOCKS_M][4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int i = 0; i < BLOCKS_M; ++i) {
            mma_m16n8k16<OPERAND>(acc[i], a[step][i], b[j % 2][2 * step], b[j % 2][2 * step + 1]);
            if (last) fragment_a.load(a[step][i], stage, i, leaf_in_stage * 2 + step);
          }
        }
#pragma unroll
        for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& sum = right[(i * BLOCKS_N + j) * 2 + half];
            sum = add_pair<OPERAND>(sum, round_pair<OPERAND>(acc[i][2 * half], acc[i][2 * half + 1]));
          }
        }
        __syncwarp();  // or the compiler puts off the sums, which keeps their rounded terms in registers
      }
      ++leaf_in_node;
      const bool node_ends = leaf_in_node == node_leaves;
      if (node_ends || leaf_in_node == node_leaves / 2) {
        add_words(left, right);
        clear_words(right);
      }
      if (node_ends) {
        const int ended = walk.nodes_ended();
        for (int level = 0; level < ended; ++level) levels.add(level, left);
        if (!walk.at_last_node()) {
          levels.put(ended, left);
          clear_words(left);
        }
        walk.step();
        node_leaves = walk.size();
        leaf_in_node = 0;
      }
    }

    copy_async_wait<0>();
    __syncthreads();
    const OutputTile target = output_tile<TILE_M, TILE_N, BAND>(p, afresh(tile));
    WarpOutput(p, shared, target).store<true>([&](int block, int j, int half) {
      const uint32_t word = left[(block * BLOCKS_N + j) * 2 + half];
      return make_float2(upcast_low<OPERAND>(word), upcast_high<OPERAND>(word));
    });
    __syncthreads();
  }
}
