// Contracts mma16 (MMA_K = 16, mma.sync.m16n8k16, sm_90 and newer) and mma8 (MMA_K = 8, mma.sync.m16n8k8, sm_80 to
// sm_89), f16 and bf16: every output is one ascending chain of tensor-core steps over the whole of K, from +0 or from
// out.
//
// Tile. TILE_M x TILE_N outputs a CTA, (TILE_M / WARPS_M) x (TILE_N / WARPS_N) a warp, both powers of two, at least 16.
// TILE_K (a multiple of 32) k a stage, STAGES of them in flight (cp.async); K's last tile is filled up with zeros,
// which change no bit. Fragments (ldmatrix) are loaded one step of 16 k ahead.
// Launch. 32 * WARPS_M * WARPS_N threads; any grid.x from 1 to min(tile count, 2^31 - 1), the tile count being
// batch * ceil(m / TILE_M) * ceil(n / TILE_N).
// Shared memory. SMEM_BYTES = max(STAGES * 2 * (TILE_M + TILE_N) * TILE_K,
//                                 WARPS_M * WARPS_N * 64 * (TILE_N / WARPS_N + 8)). Scratch: none.
// Macros. OPERAND (F16, BF16), LOAD_A, LOAD_B (Load), TILE_M, TILE_N, TILE_K, STAGES, WARPS_M, WARPS_N, MMA_K,
// CTAS_PER_SM, SMEM_BYTES.
#include "parts/mma_epilogue.cuh"
#include "parts/mma_tile.cuh"
#include "parts/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_M = TILE_M / WARPS_M;
constexpr int WARP_N = TILE_N / WARPS_N;
constexpr int BLOCKS_M = WARP_M / 16;
constexpr int BLOCKS_N = WARP_N / 16;
constexpr int STEPS = TILE_K / 16;
constexpr int BAND = TILE_N > TILE_M ? 16 : 8;  // a wave of CTAs covers about as many rows as columns

using LayoutA = TileLayout<LOAD_A, TILE_M, TILE_K>;
using LayoutB = TileLayout<LOAD_B, TILE_N, TILE_K>;
using CopyA = TileCopy<LOAD_A, TILE_M, TILE_K, THREADS>;
using CopyB = TileCopy<LOAD_B, TILE_N, TILE_K, THREADS>;
using WarpOutput = OutputSlab<WARP_M, WARP_N, WARPS_M>;

constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(MMA_K == 8 || MMA_K == 16, "the steps of mma8 and mma16");
static_assert(WARP_M % 16 == 0 && (WARP_M & (WARP_M - 1)) == 0, "a warp's rows must be a power of two, at least 16");
static_assert(WARP_N % 16 == 0 && (WARP_N & (WARP_N - 1)) == 0, "a warp's columns must be a power of two, at least 16");
static_assert(LayoutA::BYTES % LayoutB::ROW_BYTES == 0, "B's tile must start at a multiple of its rows' size");
static_assert(SMEM_BYTES >= STAGES * STAGE_BYTES, "shared memory for the stages");
static_assert(SMEM_BYTES >= WARPS_M * WARPS_N * WarpOutput::BYTES, "shared memory for the outputs' slabs");

DETKERN_INLINE void mma_step(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (MMA_K == 16) {
    mma_m16n8k16<OPERAND>(acc, a, b0, b1);
  } else {
    mma_m16n8k8<OPERAND>(acc, a[0], a[1], b0);
    mma_m16n8k8<OPERAND>(acc, a[2], a[3], b1);
  }
}

DETKERN_INLINE void multiply(float (&acc)[BLOCKS_M][2 * BLOCKS_N][4], const uint32_t (&a)[BLOCKS_M][4],
                             const uint32_t (&b)[BLOCKS_N][4]) {
#pragma unroll
  for (int j = 0; j < BLOCKS_N; ++j) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
      mma_step(acc[i][2 * j], a[i], b[j][0], b[j][1]);
      mma_step(acc[i][2 * j + 1], a[i], b[j][2], b[j][3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t first_stage = shared_address(shared);
  const uint32_t last_stage = first_stage + (STAGES - 1) * STAGE_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
  const FragmentA<LayoutA> fragment_a(warp_m, lane);
  const FragmentB<LayoutB> fragment_b(warp_n, lane);
  const uint32_t k_tiles = static_cast<uint32_t>((p.k + TILE_K - 1) / TILE_K);  // no memory holds 2^37 k

  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    const OutputTile output = output_tile<TILE_M, TILE_N, BAND>(p, tile);
    CopyA copy_a(static_cast<const uint16_t*>(p.a) + batch_offset(p, p.a_batch, output.batch), p.a_row, p.a_col,
                 output.row, p.m, p.k);
    CopyB copy_b(static_cast<const uint16_t*>(p.b) + batch_offset(p, p.b_batch, output.batch), p.b_col, p.b_row,
                 output.column, p.n, p.k);
    float acc[BLOCKS_M][2 * BLOCKS_N][4];
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * BLOCKS_N; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
      }
    }
    if (p.accumulate) {
      WarpOutput(p, shared, output).load(acc);
      __syncthreads();  // the slabs lie where the stages will
    }

#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      copy_a.start(first_stage + stage * STAGE_BYTES, LayoutA{}, stage * TILE_K);
      copy_b.start(first_stage + stage * STAGE_BYTES + LayoutA::BYTES, LayoutB{}, stage * TILE_K);
      copy_async_commit();
    }
    copy_a.fetch(0);
    copy_b.fetch(0);
    copy_a.put(first_stage, LayoutA{}, 0);
    copy_b.put(first_stage + LayoutA::BYTES, LayoutB{}, 0);
    copy_a.fetch(TILE_K);
    copy_b.fetch(TILE_K);
    // An iteration finishes the k tile before its own and does all but the last step of its own: with the barrier at
    // its start and not before the last step, the compiler sees who waits for the fragments loaded right behind it, and
    // has the last step of the other tile to cover them. The first iteration's "last step" is of zeros, which change no
    // bit.
    uint32_t a[2][BLOCKS_M][4], b[2][BLOCKS_N][4];
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) a[1][i][0] = a[1][i][1] = a[1][i][2] = a[1][i][3] = 0;
#pragma unroll
    for (int j = 0; j < BLOCKS_N; ++j) b[1][j][0] = b[1][j][1] = b[1][j][2] = b[1][j][3] = 0;
    uint32_t read = first_stage, write = last_stage;
#pragma unroll 1
    for (uint32_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
      copy_async_wait<STAGES - 2>();  // this tile is complete
      __syncthreads();                // and every thread has read the one before it, whose stage is next to be filled
      const uint32_t next = read == last_stage ? first_stage : read + STAGE_BYTES;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int loaded = step % 2, ready = 1 - loaded;
#pragma unroll
        for (int i = 0; i < BLOCKS_M; ++i) fragment_a.load(a[loaded][i], read, i, step);
#pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) fragment_b.load(b[loaded][j], read + LayoutA::BYTES, j, step);
        // The copies come after the last ldmatrix, which could not be moved before them, and on both sides of the
        // products, which takes fewer registers. Past the end of K they give zeros, with nothing read.
        if (step == STEPS - 1) {
          copy_a.start(write, LayoutA{}, (static_cast<int64_t>(k_tile) + STAGES - 1) * TILE_K);
          copy_a.put(next, LayoutA{}, (static_cast<int64_t>(k_tile) + 1) * TILE_K);
          copy_a.fetch((static_cast<int64_t>(k_tile) + 2) * TILE_K);
        }
        multiply(acc, a[ready], b[ready]);
      }
      copy_b.start(write + LayoutA::BYTES, LayoutB{}, (static_cast<int64_t>(k_tile) + STAGES - 1) * TILE_K);
      copy_b.put(next + LayoutA::BYTES, LayoutB{}, (static_cast<int64_t>(k_tile) + 1) * TILE_K);
      copy_b.fetch((static_cast<int64_t>(k_tile) + 2) * TILE_K);
      copy_async_commit();
      write = read;
      read = next;
    }
    multiply(acc, a[1], b[1]);

    copy_async_wait<0>();
    __syncthreads();
    WarpOutput(p, shared, output_tile<TILE_M, TILE_N, BAND>(p, afresh(tile))).store<false>(
        [&](int block, int j, int half) { return make_float2(acc[block][j][2 * half], acc[block][j][2 * half + 1]); });
    __syncthreads();
  }
}
