// Contract tree-mma16 (wgmma m64n64k16, sm_90a only), f16 and bf16: leaves of 32 k, two tensor-core steps from +0 and
// one rounding to the operand type, merged along the mid-split tree by sums rounded to that type. The bits are
// tree_mma.cu's.
//
// Roles. Two warp groups consume: each computes 64 rows of the CTA's outputs, a leaf in slices of 64 columns. Two sets
// of accumulators take turns, so that one slice is multiplied while another is rounded and added.
// A third warp group produces: it copies the operands into a ring of STAGES stages, a leaf each, and runs ahead into
// the next tile. A stage goes round by two mbarriers: `full`, on which the producing threads arrive as their copies
// complete, and `empty`, on which the consuming warps arrive once wgmma has read it. The fence that lets the
// asynchronous proxy see the copies is the consumers': one in the producers would wait for the copies of the later
// stages as well.
// Tree. As in tree_mma.cu: nodes of up to four leaves (node_walk.cuh) in registers, `right` gathers the right half and
// `node` the left; MergeLevels, one a consuming warp group, has the nodes above.
// Launch. 384 threads; any grid.x from 1 to min(tile count, 2^31 - 1), best the CTAs that run at once.
// Shared memory. SMEM_BYTES = STAGES * 2 * (TILE_M + TILE_N) * TILE_K + SHARED_LEVELS * 2 * TILE_M * TILE_N + 16 *
// STAGES: the ring, the levels (the outputs pass through them once a tile's tree is done), the mbarriers.
// Scratch. grid.x * max(0, D - SHARED_LEVELS) * 2 * TILE_M * TILE_N bytes, D = max(0, ceil(log2(L)) - 2), L = ceil(k /
// 32).
// Macros. OPERAND (F16, BF16), LOAD_A, LOAD_B (K_MAJOR, MN_MAJOR), TILE_M, TILE_N, TILE_K (of which 128, any multiple
// of 128, 32), STAGES, SHARED_LEVELS, WARPS_M, WARPS_N (of all roles: 12, 1), CTAS_PER_SM (1), SMEM_BYTES; for tests
// JITTER: 1 makes both roles sleep at random, 2 also signals `full` before the copies are complete, which must show.
#include "merge.cuh"
#include "mma_epilogue.cuh"
#include "node_walk.cuh"
#include "wgmma.cuh"

#ifndef JITTER
#define JITTER 0
#endif

constexpr int GROUP = 128;  // threads of a warp group
constexpr int CONSUMERS = 2;
constexpr int SLICES = TILE_N / 64;
constexpr int SLICE_WORDS = 16;  // of two outputs, a thread
constexpr int WORDS = SLICES * SLICE_WORDS;
constexpr int SLAB_N = 128;  // columns that pass through shared memory at once
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;  // three groups start with 168 a thread
constexpr int BAND = 16;  // a wave of CTAs covers about as many rows as columns

using LayoutA = AtomLayout<LOAD_A, TILE_M, TILE_K>;
using LayoutB = AtomLayout<LOAD_B, TILE_N, TILE_K>;
using CopyA = SteadyCopy<LOAD_A, LayoutA, TILE_M, TILE_K, GROUP>;
using CopyB = SteadyCopy<LOAD_B, LayoutB, TILE_N, TILE_K, GROUP>;
using Levels = MergeLevels<OPERAND, WORDS, SHARED_LEVELS, GROUP>;
using WarpOutput = OutputSlab<16, SLAB_N, CONSUMERS * GROUP / 32>;

constexpr int STAGE_BYTES = LayoutA::BYTES + LayoutB::BYTES;
constexpr int LEVELS_AT = STAGES * STAGE_BYTES;
constexpr int GROUP_LEVELS_BYTES = SHARED_LEVELS * Levels::LEVEL_BYTES;
constexpr int BARRIERS_AT = LEVELS_AT + CONSUMERS * GROUP_LEVELS_BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_M == 64 * CONSUMERS && TILE_N % SLAB_N == 0, "a consuming warp group has 64 rows");
static_assert(TILE_K == 32, "a stage is one leaf");
static_assert(32 * WARPS_M * WARPS_N == (CONSUMERS + 1) * GROUP && CTAS_PER_SM == 1, "three warp groups have the SM");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS + 1) * 168, "registers");
static_assert(STAGE_BYTES % 1024 == 0, "swizzle atoms must start at multiples of their size");
static_assert(GROUP / 32 * WarpOutput::BYTES <= GROUP_LEVELS_BYTES, "outputs pass through the levels' memory");
static_assert(SMEM_BYTES == BARRIERS_AT + 16 * STAGES, "shared memory");

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
  const uint32_t thread = threadIdx.x % GROUP;
  RingPosition position;
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    const OutputTile output = output_tile<TILE_M, TILE_N, BAND>(p, tile);
    CopyA copy_a(static_cast<const uint16_t*>(p.a) + batch_offset(p, p.a_batch, output.batch), p.a_row, p.a_col,
                 output.row, p.m, thread);
    CopyB copy_b(static_cast<const uint16_t*>(p.b) + batch_offset(p, p.b_batch, output.batch), p.b_col, p.b_row,
                 output.column, p.n, thread);
#pragma unroll 1
    for (uint32_t leaf = 0; leaf < leaves; ++leaf) {
      mbarrier_wait(ring.empty(position.stage), position.parity ^ 1);
      jitter(leaf);
      const int64_t k_left = p.k - static_cast<int64_t>(leaf) * TILE_K;
      copy_a.copy_next(ring.data(position.stage), k_left);
      copy_b.copy_next(ring.data(position.stage) + LayoutA::BYTES, k_left);
      if (JITTER != 2) {
        copy_async_arrive(ring.full(position.stage));
      } else {
        mbarrier_arrive(ring.full(position.stage));
      }
      position.step();
    }
  }
  // The consumers are a leaf ahead: one more, whose product nobody looks at.
  mbarrier_wait(ring.empty(position.stage), position.parity ^ 1);
  mbarrier_arrive(ring.full(position.stage));
  copy_async_wait_all();
}

DETKERN_INLINE void add_words(uint32_t (&sum)[WORDS], const uint32_t (&other)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) sum[i] = add_pair<OPERAND>(sum[i], other[i]);
}

// Where the consumers are in the leaves of all their tiles, and the products under way: the first two slices of the
// next leaf. The compiler must see which these are, so that leaves follow one another without branches; before a branch
// or a loop's end comes `settle`.
class Leaves {
 public:
  DETKERN_INLINE Leaves(const Ring& ring, int group) : ring_(ring), group_(group) {
    take();
    multiply(0);
    multiply(1);
    settle();
  }

  // Rounds the next leaf and adds it to `sum` (FIRST: puts it there).
  template <bool FIRST>
  DETKERN_INLINE void gather(uint32_t (&sum)[WORDS]) {
    const uint32_t stage = position_.stage;
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
      if (slice == SLICES - 2) {
        position_.step();
        take();
      }
      wgmma_wait<1>(acc_[slice % 2]);
      if (slice == SLICES - 1 && threadIdx.x % 32 == 0) mbarrier_arrive(ring_.empty(stage));
      gather_slice<FIRST>(sum, slice);
      multiply((slice + 2) % SLICES);
    }
  }

  DETKERN_INLINE void settle() {
    wgmma_wait<0>(acc_[0]);
    wgmma_wait<0>(acc_[1]);
  }

 private:
  // Waits for the current stage.
  DETKERN_INLINE void take() const {
    mbarrier_wait(ring_.full(position_.stage), position_.parity);
    fence_async_proxy();
    jitter(position_.stage);
  }

  // Starts one slice of the current stage.
  DETKERN_INLINE void multiply(int slice) {
    const uint32_t tile16 = ring_.data(position_.stage) / 16;
    const uint32_t rows16 = tile16 + LayoutA::block(1, 0) / 16 * group_;
    float(&acc)[32] = acc_[slice % 2];
    wgmma_fence();
    wgmma_m64n64k16<OPERAND, LayoutA, LayoutB, true>(acc, descriptor<LayoutA>(rows16, 0, 0),
                                                     descriptor<LayoutB>(tile16 + LayoutA::BYTES / 16, slice, 0));
    wgmma_m64n64k16<OPERAND, LayoutA, LayoutB, false>(acc, descriptor<LayoutA>(rows16, 0, 1),
                                                      descriptor<LayoutB>(tile16 + LayoutA::BYTES / 16, slice, 1));
    wgmma_commit();
  }

  // Rounds one slice and adds it.
  template <bool FIRST>
  DETKERN_INLINE void gather_slice(uint32_t (&sum)[WORDS], int slice) const {
    const float(&acc)[32] = acc_[slice % 2];
#pragma unroll
    for (int i = 0; i < SLICE_WORDS; ++i) {
      uint32_t& word = sum[slice * SLICE_WORDS + i];
      const uint32_t leaf = round_pair<OPERAND>(acc[2 * i], acc[2 * i + 1]);
      word = FIRST ? leaf : add_pair<OPERAND>(word, leaf);
      asm volatile("" : "+r"(word));  // now, not after the accumulators' next use
    }
  }

  Ring ring_;
  RingPosition position_;
  int group_;
  float acc_[2][32] = {};
};

// Writes outputs of the operands' type to which nothing is added, as the words are but for the contract's + 0. Returns
// whether they are of this kind, and lie so that words can be written.
DETKERN_INLINE bool store_words(const GemmParams& p, const OutputTile& tile, int group, const uint32_t (&node)[WORDS]) {
  uint16_t* out = static_cast<uint16_t*>(p.out) + batch_offset(p, p.out_batch, tile.batch);
  const bool odd = ((reinterpret_cast<uint64_t>(out) & 2) | (p.out_row & 1) | (p.n & 1)) != 0;
  if (p.out_dtype != OPERAND || p.bias_dtype != NONE || p.accumulate || p.out_col != 1 || odd) return false;
  const int thread = thread_index();
  const int64_t first_row = tile.row + group * 64 + thread % GROUP / 32 * 16 + thread % 32 / 4;
  const int64_t first_column = tile.column + thread % 4 * 2;
  const int columns_left = clamp(p.n - first_column, TILE_N);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + 8 * half;
    if (row >= p.m) break;
    uint32_t* target = reinterpret_cast<uint32_t*>(out + row * p.out_row + first_column);
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      if (8 * j < columns_left) target[4 * j] = add_pair<OPERAND>(node[2 * j + half], 0);
    }
  }
  return true;
}

// Writes any outputs, through the levels' memory: it is free once all of the group are here, and theirs again once all
// have written.
DETKERN_INLINE void store_through_shared(const GemmParams& p, OutputTile tile, unsigned char* shared, int group,
                                         const uint32_t (&node)[WORDS]) {
  named_barrier<GROUP>(1 + group);
  unsigned char* slabs = shared + LEVELS_AT + group * (GROUP_LEVELS_BYTES - GROUP / 32 * WarpOutput::BYTES);
#pragma unroll
  for (int part = 0; part < TILE_N / SLAB_N; ++part) {
    WarpOutput(p, slabs, tile).store<true>([&](int, int j, int half) {
      const uint32_t word = node[(part * (SLAB_N / 8) + j) * 2 + half];
      return make_float2(upcast_low<OPERAND>(word), upcast_high<OPERAND>(word));
    });
    tile.column += SLAB_N;
  }
  named_barrier<GROUP>(1 + group);
}

DETKERN_INLINE void consume(const GemmParams& p, const Ring& ring, unsigned char* shared, int group,
                            uint32_t leaf_count) {
  Leaves leaves(ring, group);
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    NodeWalk walk(leaf_count);
    // Levels go by the thread's index in the CTA; each warp group has its own.
    const int depth = walk.depth();
    const int64_t group_scratch = static_cast<int64_t>(gridDim.x) * max(depth - SHARED_LEVELS, 0) * Levels::LEVEL_BYTES;
    Levels levels(depth, ring.shared + LEVELS_AT + group * (GROUP_LEVELS_BYTES - GROUP * 16),
                  static_cast<char*>(p.scratch) + group * (group_scratch - GROUP * 16));
    uint32_t node[WORDS];
#pragma unroll 1
    while (true) {
      const uint32_t size = walk.size();
      uint32_t right[WORDS];
      if (size == 4) {
        leaves.gather<true>(node);
        leaves.gather<false>(node);
        leaves.gather<true>(right);
        leaves.gather<false>(right);
        add_words(node, right);
      } else if (size == 3) {
        leaves.gather<true>(node);
        leaves.gather<true>(right);
        leaves.gather<false>(right);
        add_words(node, right);
      } else if (size == 2) {
        leaves.gather<true>(node);
        leaves.gather<true>(right);
        add_words(node, right);
      } else {
        leaves.gather<true>(node);
      }
      const int ended = walk.nodes_ended();
      const bool last = walk.at_last_node();
#pragma unroll 1
      for (int level = 0; level < ended; ++level) levels.add(level, node);
      if (!last) levels.put(ended, node);
      leaves.settle();
      if (last) break;
      walk.step();
    }

    const OutputTile output = output_tile<TILE_M, TILE_N, BAND>(p, afresh(tile));
    if (!store_words(p, output, group, node)) store_through_shared(p, output, shared, group, node);
  }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * GROUP, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(ring.full(stage), GROUP);
      mbarrier_init(ring.empty(stage), CONSUMERS * GROUP / 32);
    }
  }
  __syncthreads();
  // No memory holds 2^37 k. Of an empty sum one leaf is made, of zeros.
  const uint32_t leaves = max(static_cast<uint32_t>((p.k + TILE_K - 1) / TILE_K), 1u);
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);  // the same in all lanes, and known to be
  if (group == CONSUMERS) {
    give_up_registers<PRODUCER_REGISTERS>();
    produce(p, ring, leaves);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(p, ring, shared, group, leaves);
  }
}
