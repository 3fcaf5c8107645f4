// Contract tree-mma16 (wgmma m64n64k16 in the tables, sm_90a only), f16 and bf16: leaves of 32 k, two tensor-core steps from +0 and
// one rounding to the operand type, merged along the mid-split tree by sums rounded to that type. The bits are
// tree_mma.cu's.
//
// Roles. GROUPS_M x GROUPS_N warp groups consume, each 64 rows and GROUP_N columns of the CTA's outputs. A group waits for
// its own products, rounds and adds them; the others' keep the tensor cores busy meanwhile. One more warp group produces:
// one thread of it fills a ring of STAGES stages by TMA (pipeline.cuh).
// Tree. Nodes of up to four leaves (node_walk.cuh) in registers, `right` gathers the right half and `node` the left;
// the lowest REGISTER_LEVELS of the waiting nodes above in registers too, MergeLevels has the others.
// Launch. 128 * (GROUPS_M * GROUPS_N + 1) threads; any grid.x from 1 to the tile count, best the CTAs that run at once.
// Shared memory. SMEM_BYTES = STAGES * 2 * (TILE_M + TILE_N) * TILE_K + max(SHARED_LEVELS * 2 * TILE_M * TILE_N, slabs)
// + 16 * STAGES + 1024 (to align the ring): the ring, the levels (the outputs pass through them once a tile's tree is
// done), the mbarriers. slabs = 160 * TILE_M * GROUPS_N bytes.
// Scratch. grid.x * max(0, D - REGISTER_LEVELS - SHARED_LEVELS) * 2 * TILE_M * TILE_N bytes, D = max(0, ceil(log2(L)) -
// 2), L = ceil(k / 32).
// Macros. OPERAND (F16, BF16), LOAD_A, LOAD_B (K_MAJOR, MN_MAJOR; both by TMA), TILE_M, TILE_N, TILE_K (64: two
// leaves), STAGES, GROUPS_M, GROUPS_N, REGISTER_LEVELS (0, 1, 2), SHARED_LEVELS, BAND (tile rows),
// CTAS_PER_SM (1), SMEM_BYTES; for tests JITTER (pipeline.cuh).
#include "merge.cuh"
#include "mma_epilogue.cuh"
#include "node_walk.cuh"
#include "pipeline.cuh"

constexpr int GROUP = 128;  // threads of a warp group
constexpr int CONSUMERS = GROUPS_M * GROUPS_N;
constexpr int CONSUMING_WARPS = 4 * CONSUMERS;
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int GROUP_N = TILE_N / GROUPS_N;
constexpr int WORDS = GROUP_N / 4;  // of two outputs, a thread
constexpr int LEAF = 32;
// At launch all threads have the same; the consumers take what the producers give up.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

using TileA = TmaTile<LOAD_A, TILE_M, TILE_K>;
using TileB = TmaTile<LOAD_B, TILE_N, TILE_K>;
using StageRing = Ring<TileA, TileB, STAGES>;
using Position = RingPosition<STAGES>;
using Walk = TileWalk<TILE_M, TILE_N, BAND>;
using Levels = MergeLevels<OPERAND, WORDS, SHARED_LEVELS, CONSUMERS * GROUP>;
constexpr int SLAB_N = 32;  // columns of a warp that pass through shared memory at once
using WarpOutput = OutputSlab<16, SLAB_N, CONSUMING_WARPS / GROUPS_N, GROUP_N>;

constexpr int LEVELS_AT = STAGES * StageRing::STAGE_BYTES;
constexpr int LEVELS_BYTES = SHARED_LEVELS * Levels::LEVEL_BYTES > CONSUMING_WARPS* WarpOutput::BYTES
                                 ? SHARED_LEVELS * Levels::LEVEL_BYTES
                                 : CONSUMING_WARPS * WarpOutput::BYTES;
constexpr int BARRIERS_AT = LEVELS_AT + LEVELS_BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_M == 64 * GROUPS_M && GROUP_N * GROUPS_N == TILE_N, "a warp group has 64 rows");
static_assert(TILE_K == 2 * LEAF && CTAS_PER_SM == 1, "a stage is two leaves; a CTA has the SM");
static_assert(SMEM_BYTES == BARRIERS_AT + StageRing::BARRIER_BYTES + 1024, "shared memory");

DETKERN_INLINE void add_words(uint32_t (&sum)[WORDS], const uint32_t (&other)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) sum[i] = add_pair<OPERAND>(sum[i], other[i]);
}

DETKERN_INLINE void copy_words(uint32_t (&target)[WORDS], const uint32_t (&source)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) target[i] = source[i];
}

// Where a consumer is in the leaves of all its tiles. Which half of its stage a leaf is, is known where the code is
// written out, so that little more than the products, roundings and sums remains of it.
class Leaves {
 public:
  // row, column: of the group's outputs in the tile.
  DETKERN_INLINE Leaves(const StageRing& ring, int row, int column)
      : ring_(ring), ready_(false), row_offset_(TileA::offset(row, 0)), column_offset_(TileB::offset(column, 0)) {}

  // Rounds the next leaf and adds it to `sum` (FIRST: puts it there).
  template <int HALF, bool FIRST>
  DETKERN_INLINE void gather(uint32_t (&sum)[WORDS]) {
    if (HALF == 0) {
      ring_.take(position_, ready_);
      a_ = TileA::low_word(ring_.a(position_.stage) + row_offset_);
      b_ = TileB::low_word(ring_.b(position_.stage) + column_offset_);
    }
    float acc[GROUP_N / 2];
    wgmma_fence();
    multiply<true>(acc, 2 * HALF);
    multiply<false>(acc, 2 * HALF + 1);
    wgmma_commit();
    if (HALF == 1) ready_ = ring_.full_already(position_.next());
    wgmma_wait<0>();
    hold(acc);
    if (HALF == 1) leave_stage();
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t leaf = round_pair<OPERAND>(acc[2 * i], acc[2 * i + 1]);
      sum[i] = FIRST ? leaf : add_pair<OPERAND>(sum[i], leaf);
    }
  }

  // Gathers a node of `size` leaves, the first of which is that half of its stage.
  template <int HALF>
  DETKERN_INLINE void gather_node(uint32_t size, uint32_t (&node)[WORDS]) {
    uint32_t right[WORDS];
    gather<HALF, true>(node);
    if (size == 4) {
      gather<HALF ^ 1, false>(node);
      gather<HALF, true>(right);
      gather<HALF ^ 1, false>(right);
    } else if (size == 3) {
      gather<HALF ^ 1, true>(right);
      gather<HALF, false>(right);
    } else if (size == 2) {
      gather<HALF ^ 1, true>(right);
    } else {
      return;
    }
    add_words(node, right);
  }

  // The current stage is read: by its second leaf, or by the last leaf of an odd number.
  DETKERN_INLINE void leave_stage() {
    ring_.release(position_.stage);
    position_.step();
  }

  // The stage that ended a tile was left with its second leaf empty: nothing is known of the next one.
  DETKERN_INLINE void leave_tile() {
    leave_stage();
    ready_ = false;
  }

 private:
  template <bool FROM_ZERO>
  DETKERN_INLINE void multiply(float (&acc)[GROUP_N / 2], int step) const {
    wgmma<GROUP_N, OPERAND, FROM_ZERO, TileA::TRANSPOSED, TileB::TRANSPOSED>(
        acc, TileA::descriptor(a_, TileA::offset(0, step)), TileB::descriptor(b_, TileB::offset(0, step)));
  }

  StageRing ring_;
  Position position_;
  bool ready_;  // whether that stage is known to be full: asking takes long enough to do it beforehand
  uint32_t row_offset_, column_offset_;
  uint32_t a_, b_;  // low words of descriptors, in the current stage
};

// Writes outputs of the operands' type to which nothing is added, as the words are but for the contract's + 0. Returns
// whether they are of this kind, and lie so that words can be written.
DETKERN_INLINE bool store_words(const GemmParams& p, const OutputTile& tile, int row, int column,
                                const uint32_t (&node)[WORDS]) {
  uint16_t* out = static_cast<uint16_t*>(p.out) + batch_offset(p, p.out_batch, tile.batch);
  const bool odd = ((reinterpret_cast<uint64_t>(out) & 2) | (p.out_row & 1) | (p.n & 1)) != 0;
  if (p.out_dtype != OPERAND || p.bias_dtype != NONE || p.accumulate || p.out_col != 1 || odd) return false;
  const int thread = thread_index();
  const int64_t first_row = tile.row + row + thread % GROUP / 32 * 16 + thread % 32 / 4;
  const int64_t first_column = tile.column + column + thread % 4 * 2;
  const int columns_left = clamp(p.n - first_column, GROUP_N);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (first_row + 8 * half >= p.m) break;
    uint32_t* target = reinterpret_cast<uint32_t*>(out + (first_row + 8 * half) * p.out_row + first_column);
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) {
      if (8 * j < columns_left) target[4 * j] = add_pair<OPERAND>(node[2 * j + half], 0);
    }
  }
  return true;
}

// Writes any outputs, through the levels' memory: it is free once all consumers are here, and theirs again once all
// have written.
DETKERN_INLINE void store_through_shared(const GemmParams& p, OutputTile tile, unsigned char* slabs,
                                         const uint32_t (&node)[WORDS]) {
  named_barrier<CONSUMERS * GROUP>(1);
#pragma unroll
  for (int part = 0; part < WORDS * 4 / SLAB_N; ++part) {
    WarpOutput(p, slabs, tile).template store<true>([&](int, int j, int half) {
      const uint32_t word = node[(part * (SLAB_N / 8) + j) * 2 + half];
      return make_float2(upcast_low<OPERAND>(word), upcast_high<OPERAND>(word));
    });
    tile.column += SLAB_N;
  }
  named_barrier<CONSUMERS * GROUP>(1);
}

DETKERN_INLINE void consume(const GemmParams& p, const StageRing& ring, unsigned char* levels_memory, int group,
                            uint32_t leaf_count) {
  const int row = group % GROUPS_M * 64, column = group / GROUPS_M * GROUP_N;
  Leaves leaves(ring, row, column);
  for (Walk tiles(p); tiles.more(); tiles.step()) {
    NodeWalk walk(leaf_count);
    Levels levels(walk.depth() - REGISTER_LEVELS, shared_address(levels_memory), p.scratch);
    uint32_t half = 0;  // of its stage, that the next leaf is
    uint32_t node[WORDS];
    uint32_t waiting[REGISTER_LEVELS > 0 ? REGISTER_LEVELS : 1][WORDS];
#pragma unroll 1
    while (true) {
      const uint32_t size = walk.size();
      if (half == 0) {
        leaves.gather_node<0>(size, node);
      } else {
        leaves.gather_node<1>(size, node);
      }
      half ^= size & 1;
      const int ended = walk.nodes_ended();
      const bool last = walk.at_last_node();
#pragma unroll
      for (int level = 0; level < REGISTER_LEVELS; ++level) {
        if (level < ended) {
          // left + right
#pragma unroll
          for (int i = 0; i < WORDS; ++i) node[i] = add_pair<OPERAND>(waiting[level][i], node[i]);
        } else if (level == ended) {
          copy_words(waiting[level], node);
        }
      }
#pragma unroll 1
      for (int level = REGISTER_LEVELS; level < ended; ++level) levels.add(level - REGISTER_LEVELS, node);
      if (!last && ended >= REGISTER_LEVELS) levels.put(ended - REGISTER_LEVELS, node);
      if (last) break;
      walk.step();
    }

    if (half != 0) leaves.leave_tile();

    const OutputTile output = tiles.output();
    if (!store_words(p, output, row, column, node)) store_through_shared(p, output, levels_memory, node);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ TensorMap map_a,
                   const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_out) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
  const StageRing ring{shared_address(shared), shared_address(shared) + BARRIERS_AT};
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);  // the same in all lanes, and known to be
  // A product without k is not this kernel's.
  const uint32_t leaves = static_cast<uint32_t>((p.k + LEAF - 1) / LEAF);
  if (group == CONSUMERS) {
    give_up_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 > CONSUMING_WARPS) return;
    if (elected()) {
      prefetch_tensor_map(map_b);
      prefetch_tensor_map(map_a);
    }
    ring.init(CONSUMING_WARPS);
    start_producing<(CONSUMING_WARPS + 1) * 32>();
    if (elected()) {
      produce<TileA, TileB, TILE_K>(p, map_a, map_b, ring, Position(), Walk(p), (leaves + 1) / 2);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    start_consuming<(CONSUMING_WARPS + 1) * 32>();
    consume(p, ring, shared + LEVELS_AT, group, leaves);
  }
}
