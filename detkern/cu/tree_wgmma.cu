// Contract tree-mma16 (wgmma m64n64k16, sm_90a only), f16 and bf16: leaves of 32 k, two tensor-core steps from +0 and one
// rounding to the operand type, merged along the mid-split tree by sums rounded to that type. The bits are tree_mma.cu's.
//
// Roles. Two warp groups consume: each computes 64 x 256 of the CTA's 128 x 256 outputs, a leaf in four quarters of 64
// columns. Two sets of accumulators take turns, so that one quarter is multiplied while another is rounded and added.
// A third warp group produces: it copies the operands into a ring of STAGES stages, a leaf each, and runs ahead into the next
// tile. A stage goes round by two mbarriers: `full`, on which the producing warps arrive once their copies are complete and
// fenced for the asynchronous proxy, and `empty`, on which the consuming warps arrive once wgmma has read it.
// Tree. As in tree_mma.cu: nodes of up to four leaves (node_walk.cuh) in registers, `right` gathers the right half and `left`
// holds the left; MergeLevels, one a consuming warp group, has the nodes above. -0 + x is x for every x.
// Launch. 384 threads; any grid.x from 1 to min(tile count, 2^31 - 1), best the CTAs that run at once.
// Shared memory. SMEM_BYTES = STAGES * 2 * (TILE_M + TILE_N) * TILE_K + SHARED_LEVELS * 2 * TILE_M * TILE_N + 16 * STAGES: the
// ring, the levels (the outputs pass through them once a tile's tree is done), the mbarriers.
// Scratch. grid.x * max(0, D - SHARED_LEVELS) * 2 * TILE_M * TILE_N bytes, D = max(0, ceil(log2(L)) - 2), L = ceil(k / 32).
// Macros. OPERAND (F16, BF16), LOAD_A, LOAD_B (K_MAJOR, MN_MAJOR), TILE_M, TILE_N, TILE_K (of which 128, 256, 32 only), STAGES,
// SHARED_LEVELS, WARPS_M, WARPS_N (of all roles: 12, 1), CTAS_PER_SM (1), SMEM_BYTES; for tests JITTER: 1 makes both roles
// sleep at random, 2 also signals `full` before the copies are complete, which must show.
#include "merge.cuh"
#include "mma_epilogue.cuh"
#include "node_walk.cuh"
#include "wgmma.cuh"

#ifndef JITTER
#define JITTER 0
#endif

constexpr int GROUP = 128;  // threads of a warp group
constexpr int CONSUMERS = 2;
constexpr int GROUP_M = TILE_M / CONSUMERS;
constexpr int QUARTERS = TILE_N / 64;
constexpr int QUARTER_WORDS = 16;  // of two outputs, a thread
constexpr int WORDS = QUARTERS * QUARTER_WORDS;
constexpr int SLAB_N = 128;  // columns that pass through shared memory at once
constexpr int IN_FLIGHT = JITTER == 2 ? 0 : STAGES / 2;  // stages whose copies the producer has started but not waited for
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int BAND = 16;  // a wave of CTAs covers about as many rows as columns
constexpr uint32_t MINUS_ZEROS = 0x80008000u;

using LayoutA = AtomLayout<LOAD_A, TILE_M, TILE_K>;
using LayoutB = AtomLayout<LOAD_B, TILE_N, TILE_K>;
using CopyA = TileCopy<LOAD_A, TILE_M, TILE_K, GROUP>;
using CopyB = TileCopy<LOAD_B, TILE_N, TILE_K, GROUP>;
using Levels = MergeLevels<OPERAND, WORDS, SHARED_LEVELS, GROUP>;
using WarpOutput = OutputSlab<16, SLAB_N, CONSUMERS * GROUP / 32>;

constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES;
constexpr int LEVELS_AT = STAGES * STAGE_BYTES;
constexpr int GROUP_LEVELS_BYTES = SHARED_LEVELS * Levels::LEVEL_BYTES;
constexpr int BARRIERS_AT = LEVELS_AT + CONSUMERS * GROUP_LEVELS_BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_M == 128 && TILE_N == 256 && TILE_K == 32, "a stage is one leaf; the registers are laid out for this tile");
static_assert(32 * WARPS_M * WARPS_N == (CONSUMERS + 1) * GROUP && CTAS_PER_SM == 1, "three warp groups have the SM");
static_assert(STAGE_BYTES % 1024 == 0, "swizzle atoms must start at multiples of their size");
static_assert(GROUP / 32 * WarpOutput::BYTES <= GROUP_LEVELS_BYTES, "outputs pass through the levels' memory");
static_assert(SMEM_BYTES == BARRIERS_AT + 16 * STAGES, "shared memory");
static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * GROUP <= 65536, "an SM's registers");

// One stage of the ring and the parity of its phase, going round.
struct RingPosition {
  uint32_t stage = 0, parity = 0;

  DETKERN_INLINE void step() {
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

struct Ring {
  uint32_t shared;

  DETKERN_INLINE uint32_t data(uint32_t stage) const { return shared + stage * STAGE_BYTES; }
  DETKERN_INLINE uint32_t full(uint32_t stage) const { return shared + BARRIERS_AT + stage * 16; }
  DETKERN_INLINE uint32_t empty(uint32_t stage) const { return full(stage) + 8; }
};

// Sleeps up to two microseconds, at random.
DETKERN_INLINE void jitter(uint32_t salt) {
  if constexpr (JITTER != 0) {
    uint32_t clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    const uint32_t hash = (clock ^ salt ^ blockIdx.x << 16 ^ threadIdx.x / 32) * 0x9e3779b1u;
    if (hash >> 30 == 0) __nanosleep(hash >> 19 & 2047);
  }
}

DETKERN_INLINE void produce(const GemmParams& p, const Ring& ring, uint32_t leaves) {
  const bool leader = threadIdx.x % 32 == 0;
  RingPosition next, landed;
  uint32_t waiting = 0;  // stages whose copies have been started but not waited for
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    const OutputTile output = output_tile<TILE_M, TILE_N, BAND>(p, tile);
    const CopyA copy_a(static_cast<const uint16_t*>(p.a) + batch_offset(p, p.a_batch, output.batch), p.a_row, p.a_col,
                       output.row, p.m, p.k);
    const CopyB copy_b(static_cast<const uint16_t*>(p.b) + batch_offset(p, p.b_batch, output.batch), p.b_col, p.b_row,
                       output.column, p.n, p.k);
#pragma unroll 1
    for (uint32_t leaf = 0; leaf < leaves; ++leaf) {
      mbarrier_wait(ring.empty(next.stage), next.parity ^ 1);
      jitter(leaf);
      const int64_t k0 = static_cast<int64_t>(leaf) * TILE_K;
      copy_a.copy(ring.data(next.stage), LayoutA{}, k0);
      copy_b.copy(ring.data(next.stage) + LayoutA::BYTES, LayoutB{}, k0);
      copy_async_commit();
      next.step();
      if (waiting < IN_FLIGHT) {
        ++waiting;
        continue;
      }
      if (JITTER != 2) copy_async_wait<IN_FLIGHT>();
      fence_async_proxy();
      __syncwarp();
      if (leader) mbarrier_arrive(ring.full(landed.stage));
      landed.step();
    }
  }
  copy_async_wait<0>();
  fence_async_proxy();
  __syncwarp();
  for (; waiting > 0; --waiting) {
    if (leader) mbarrier_arrive(ring.full(landed.stage));
    landed.step();
  }
}

DETKERN_INLINE void add_words(uint32_t (&sum)[WORDS], const uint32_t (&other)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) sum[i] = add_pair<OPERAND>(sum[i], other[i]);
}

DETKERN_INLINE void clear_words(uint32_t (&words)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = MINUS_ZEROS;
}

// Starts one quarter of a leaf.
DETKERN_INLINE void multiply(float (&acc)[32], const uint32_t (&a)[2][4], uint32_t tile_b, int quarter) {
  wgmma_fence();
  wgmma_m64n64k16<OPERAND, LayoutB, true>(acc, a[0], descriptor<LayoutB>(tile_b + LayoutB::block(quarter, 0)));
  wgmma_m64n64k16<OPERAND, LayoutB, false>(acc, a[1], descriptor<LayoutB>(tile_b + LayoutB::block(quarter, 1)));
  wgmma_commit();
}

// Rounds one quarter of a leaf and adds it.
DETKERN_INLINE void gather(uint32_t (&sum)[WORDS], const float (&acc)[32], int quarter) {
#pragma unroll
  for (int i = 0; i < QUARTER_WORDS; ++i) {
    uint32_t& word = sum[quarter * QUARTER_WORDS + i];
    word = add_pair<OPERAND>(word, round_pair<OPERAND>(acc[2 * i], acc[2 * i + 1]));
    asm volatile("" : "+r"(word));  // now, not after the accumulators' next use
  }
}

DETKERN_INLINE void consume(const GemmParams& p, const Ring& ring, unsigned char* shared, int group, uint32_t leaves) {
  const bool leader = threadIdx.x % 32 == 0;
  const FragmentA<LayoutA> fragment_a(group * GROUP_M + threadIdx.x % GROUP / 32 * 16, threadIdx.x % 32);
  RingPosition position;
  float acc[2][32] = {};
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    NodeWalk walk(leaves);
    // Levels go by the thread's index in the CTA; each warp group has its own.
    const int depth = walk.depth();
    const int64_t group_scratch = static_cast<int64_t>(gridDim.x) * max(depth - SHARED_LEVELS, 0) * Levels::LEVEL_BYTES;
    Levels levels(depth, ring.shared + LEVELS_AT + group * (GROUP_LEVELS_BYTES - GROUP * 16),
                  static_cast<char*>(p.scratch) + group * (group_scratch - GROUP * 16));
    uint32_t left[WORDS], right[WORDS];
    clear_words(left);
    clear_words(right);

#pragma unroll 1
    for (uint32_t leaf = 0; leaf < leaves; ++leaf) {
      const uint32_t tile_a = ring.data(position.stage), tile_b = tile_a + LayoutA::BYTES;
      mbarrier_wait(ring.full(position.stage), position.parity);
      jitter(leaf);
      uint32_t a[2][4];
#pragma unroll
      for (int step = 0; step < 2; ++step) fragment_a.load(a[step], tile_a, 0, step);
      multiply(acc[0], a, tile_b, 0);
      multiply(acc[1], a, tile_b, 1);
#pragma unroll
      for (int quarter = 0; quarter < QUARTERS - 2; ++quarter) {
        wgmma_wait<1>(acc[quarter % 2]);
        gather(right, acc[quarter % 2], quarter);
        multiply(acc[quarter % 2], a, tile_b, quarter + 2);
      }
      wgmma_wait<1>(acc[QUARTERS % 2]);
      gather(right, acc[QUARTERS % 2], QUARTERS - 2);
      wgmma_wait<0>(acc[(QUARTERS + 1) % 2]);
      if (leader) mbarrier_arrive(ring.empty(position.stage));
      position.step();
      gather(right, acc[(QUARTERS + 1) % 2], QUARTERS - 1);

      if (walk.ends_left_half() || walk.ends_node()) {
        add_words(left, right);
        clear_words(right);
        if (walk.ends_node()) {
          const int ended = walk.nodes_ended();
          for (int level = 0; level < ended; ++level) levels.add(level, left);
          if (leaf + 1 < leaves) {
            levels.put(ended, left);
            clear_words(left);
          }
        }
      }
      walk.step();
    }

    // The levels' memory is free once all of the group are here, and theirs again once all have written.
    named_barrier<GROUP>(1 + group);
    OutputTile output = output_tile<TILE_M, TILE_N, BAND>(p, afresh(tile));
    unsigned char* slabs = shared + LEVELS_AT + group * (GROUP_LEVELS_BYTES - GROUP / 32 * WarpOutput::BYTES);
#pragma unroll
    for (int part = 0; part < TILE_N / SLAB_N; ++part) {
      WarpOutput(p, slabs, output).store<true>([&](int, int j, int half) {
        const uint32_t word = left[(part * (SLAB_N / 8) + j) * 2 + half];
        return make_float2(upcast_low<OPERAND>(word), upcast_high<OPERAND>(word));
      });
      output.column += SLAB_N;
    }
    named_barrier<GROUP>(1 + group);
  }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * GROUP, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(ring.full(stage), GROUP / 32);
      mbarrier_init(ring.empty(stage), CONSUMERS * GROUP / 32);
    }
  }
  __syncthreads();
  const uint32_t leaves = static_cast<uint32_t>((p.k + TILE_K - 1) / TILE_K);  // no memory holds 2^37 k
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);  // the same in all lanes, and known to be
  if (group == CONSUMERS) {
    give_up_registers<PRODUCER_REGISTERS>();
    produce(p, ring, leaves);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(p, ring, shared, group, leaves);
  }
}
