// Contract tree-mma16 (wgmma m64n64k16, sm_90a only), f16 and bf16: leaves of 32 k, two tensor-core steps from +0 and
// one rounding to the operand type, merged along the mid-split tree by sums rounded to that type. The bits are
// tree_mma.cu's.
//
// Roles. GROUPS_M x GROUPS_N warp groups consume, each 64 rows and GROUP_N columns of the CTA's outputs. A group waits
// for its own products, rounds and adds them; the others' keep the tensor cores busy meanwhile. One more warp group
// produces: one thread of it fills a ring of STAGES stages by TMA (parts/ring.cuh).
// Tree. Nodes of up to eight leaves (node_walk.cuh) are gathered in registers. Of the nodes that wait for their sibling
// the lowest lies in registers for the most part (Sibling), others in shared memory and scratch (MergeLevels): wgmma
// and TMA need nearly all of shared memory's bandwidth. Launch. 128 * (GROUPS_M * GROUPS_N + 1) threads; any grid.x
// from 1 to the tile count, best the CTAs that run at once. Shared memory. SMEM_BYTES = STAGES * 2 * (TILE_M + TILE_N)
// * TILE_K + max((0.5 + 2 * SHARED_LEVELS) * TILE_M * TILE_N, slabs) + 16 * STAGES + 1024 (to align the ring): the
// ring, the waiting nodes (the outputs pass through their memory once a tile's tree is done), the mbarriers. slabs =
// 160 * TILE_M * GROUPS_N bytes. Scratch. grid.x * max(0, D - 1 - SHARED_LEVELS) * 2 * TILE_M * TILE_N bytes, D =
// max(0, ceil(log2(L)) - 3), L = ceil(k / 32). Macros. OPERAND (F16, BF16), LOAD_A, LOAD_B (K_MAJOR, MN_MAJOR; both by
// TMA), TILE_M, TILE_N, TILE_K (64: two leaves), STAGES (best a multiple of 4: Leaves), GROUPS_M, GROUPS_N,
// SHARED_LEVELS, BAND (tile rows), CTAS_PER_SM (1), SMEM_BYTES; for tests JITTER (Sleep of parts/ring.cuh).
#include "parts/merge.cuh"
#include "parts/mma_epilogue.cuh"
#include "parts/node_walk.cuh"
#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/producer.cuh"
#include "parts/ring.cuh"
#include "parts/roles.cuh"
#include "parts/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#ifndef JITTER
#define JITTER 0
#endif

constexpr int CONSUMERS = GROUPS_M * GROUPS_N;
constexpr int CONSUMING_WARPS = 4 * CONSUMERS;
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int GROUP_N = TILE_N / GROUPS_N;
constexpr int WORDS = GROUP_N / 4;  // of two outputs, a thread
constexpr int LEAF = 32;
constexpr uint32_t NODE_LEAVES = 8;

using TileA = TmaTile<LOAD_A, TILE_M, TILE_K>;
using TileB = TmaTile<LOAD_B, TILE_N, TILE_K>;
using StageRing = Ring<TileA, TileB, STAGES, 1, Sleep(JITTER)>;
using CtaRoles = Roles<CONSUMERS, THREADS, CTAS_PER_SM, 24>;
using Position = RingPosition<STAGES>;
using Walk = TileWalk<TILE_M, TILE_N, BAND, SHARED_NONE, TileA::MN_ROWS ? 8 : 1>;
using Levels = MergeLevels<OPERAND, WORDS, SHARED_LEVELS, CONSUMERS * GROUP>;
constexpr int KEPT_WORDS = WORDS * 3 / 4;  // of a waiting node, in registers
using OtherWords = MergeLevels<OPERAND, WORDS - KEPT_WORDS, 1, CONSUMERS * GROUP>;
constexpr int SLAB_N = 32;  // columns of a warp that pass through shared memory at once
using WarpOutput = OutputSlab<16, SLAB_N, CONSUMING_WARPS / GROUPS_N, GROUP_N, true>;

constexpr int SIBLING_AT = STAGES * StageRing::STAGE_BYTES;
constexpr int LEVELS_AT = SIBLING_AT + OtherWords::LEVEL_BYTES;
constexpr int TREE_BYTES = OtherWords::LEVEL_BYTES + SHARED_LEVELS * Levels::LEVEL_BYTES;
constexpr int SLABS_BYTES = CONSUMING_WARPS * WarpOutput::BYTES;
constexpr int BARRIERS_AT = SIBLING_AT + (TREE_BYTES > SLABS_BYTES ? TREE_BYTES : SLABS_BYTES);
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_M == 64 * GROUPS_M && GROUP_N * GROUPS_N == TILE_N, "a warp group has 64 rows");
static_assert(TILE_K == 2 * LEAF && CTAS_PER_SM == 1, "a stage is two leaves; a CTA has the SM");
static_assert(SMEM_BYTES == BARRIERS_AT + StageRing::BARRIER_BYTES + 1024, "shared memory");

// The lowest of the nodes that wait for their sibling: as much of it in registers as there are.
class Sibling {
 public:
  DETKERN_INLINE explicit Sibling(uint32_t shared) : others_(1, shared, nullptr) {}

  DETKERN_INLINE void put(uint32_t (&node)[WORDS]) {
#pragma unroll
    for (int i = 0; i < KEPT_WORDS; ++i) kept_[i] = node[i];
    others_.put(0, other_words(node));
  }

  DETKERN_INLINE void add_to(uint32_t (&node)[WORDS]) const {
#pragma unroll
    for (int i = 0; i < KEPT_WORDS; ++i) node[i] = add_pair<OPERAND>(kept_[i], node[i]);
    others_.add(0, other_words(node));
  }

 private:
  using Others = uint32_t[WORDS - KEPT_WORDS];

  static DETKERN_INLINE Others& other_words(uint32_t (&node)[WORDS]) {
    return reinterpret_cast<Others&>(node[KEPT_WORDS]);
  }

  uint32_t kept_[KEPT_WORDS];
  OtherWords others_;
};

// Where a consumer is in the leaves of all its tiles. Which half of its stage a leaf is, is known where the code is
// written out, so that little more than the products, roundings and sums remains of it.
class Leaves {
 public:
  static constexpr bool HAS_ROUNDS = STAGES % (NODE_LEAVES / 2) == 0;

  // row, column: of the group's outputs in the tile.
  DETKERN_INLINE Leaves(const StageRing& ring, int row, int column)
      : ring_(ring),
        ready_(false),
        first_a_(TileA::low_word(ring.a(0) + TileA::offset(row, 0))),
        first_b_(TileB::low_word(ring.b(0) + TileB::offset(column, 0))) {}

  // Whether a node of `size` leaves, the first of which is that half of its stage, is a round: whole, and its first
  // stage's number divides by a round's stages. Where its stages lie is known but for one address, and altogether where
  // the ring is a round.
  DETKERN_INLINE bool is_round(uint32_t size, uint32_t half) const {
    return HAS_ROUNDS && size == NODE_LEAVES && half == 0 && position_.stage % ROUND_STAGES == 0;
  }

  // Gathers a node that is_round. meanwhile: what there is to do while its last products are on their way.
  template <class Meanwhile>
  DETKERN_INLINE void gather_round(uint32_t (&node)[WORDS], const Meanwhile& meanwhile) {
    gather<NODE_LEAVES, 0, true>(node, meanwhile);
  }

  // Gathers a node of `size` leaves, the first of which is that half of its stage.
  template <class Meanwhile>
  DETKERN_INLINE void gather_node(uint32_t size, uint32_t half, uint32_t (&node)[WORDS], const Meanwhile& meanwhile) {
    if (half == 0) {
      gather_any<0>(size, node, meanwhile);
    } else {
      gather_any<1>(size, node, meanwhile);
    }
  }

  // The stage that ended a tile was left with its second leaf empty: nothing is known of the next one.
  DETKERN_INLINE void leave_tile() {
    ring_.release(position_.stage);
    position_.step();
    ready_ = false;
  }

 private:
  static constexpr uint32_t ROUND_STAGES = NODE_LEAVES / 2;

  // By comparisons: a jump through a table of addresses waits for the constant that it reads.
  template <int HALF, class Meanwhile>
  DETKERN_INLINE void gather_any(uint32_t size, uint32_t (&node)[WORDS], const Meanwhile& meanwhile) {
    if (size > 6) {
      if (size == 8) {
        gather<8, HALF, false>(node, meanwhile);
      } else {
        gather<7, HALF, false>(node, meanwhile);
      }
    } else if (size > 4) {
      if (size == 6) {
        gather<6, HALF, false>(node, meanwhile);
      } else {
        gather<5, HALF, false>(node, meanwhile);
      }
    } else if (size == 4) {
      gather<4, HALF, false>(node, meanwhile);
    } else if constexpr (HALF == 0) {  // of at most three leaves is only a whole tree
      if (size == 3) {
        gather<3, HALF, false>(node, meanwhile);
      } else if (size == 2) {
        gather<2, HALF, false>(node, meanwhile);
      } else {
        gather<1, HALF, false>(node, meanwhile);
      }
    }
  }

  // Gathers a node of SIZE leaves, the first of which is leaf FIRST of a round (IN_ROUND) or half FIRST of the current
  // stage: the sum of its halves, the left of which is the smaller one.
  template <int SIZE, int FIRST, bool IN_ROUND, class Meanwhile>
  DETKERN_INLINE void gather(uint32_t (&node)[WORDS], const Meanwhile& meanwhile) {
    constexpr int LEFT = SIZE / 2, MIDDLE = IN_ROUND ? FIRST + LEFT : (FIRST + LEFT) % 2;
    if constexpr (SIZE == 1) {
      gather_leaf<FIRST, IN_ROUND, true>(node, meanwhile);
    } else {
      gather<LEFT, FIRST, IN_ROUND>(node, [] {});
      if constexpr (SIZE == 2) {
        gather_leaf<MIDDLE, IN_ROUND, false>(node, meanwhile);
      } else {
        uint32_t right[WORDS];
        gather<SIZE - LEFT, MIDDLE, IN_ROUND>(right, meanwhile);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) node[i] = add_pair<OPERAND>(node[i], right[i]);
      }
    }
  }

  // Rounds the next leaf and adds it to `sum` (ALONE: puts it there).
  template <int NUMBER, bool IN_ROUND, bool ALONE, class Meanwhile>
  DETKERN_INLINE void gather_leaf(uint32_t (&sum)[WORDS], const Meanwhile& meanwhile) {
    constexpr int HALF = NUMBER % 2;
    Position at = position_;
    if (IN_ROUND) at.stage = NUMBER / 2 + (ROUND_STAGES == STAGES ? 0 : at.stage);
    if (HALF == 0) ring_.take(at, ready_);
    float acc[GROUP_N / 2];
    wgmma_fence();
    multiply<true>(acc, at.stage, 2 * HALF);
    multiply<false>(acc, at.stage, 2 * HALF + 1);
    wgmma_commit();
    if (HALF == 1) {
      Position next = at;
      next.step();
      if (!IN_ROUND || NUMBER == 2 * ROUND_STAGES - 1) position_ = next;
      ready_ = ring_.full_already(next);
    }
    meanwhile();
    wgmma_wait<0>();
    hold(acc);
    if (HALF == 1) ring_.release(at.stage);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t leaf = round_pair<OPERAND>(acc[2 * i], acc[2 * i + 1]);
      sum[i] = ALONE ? leaf : add_pair<OPERAND>(sum[i], leaf);
    }
  }

  template <bool FROM_ZERO>
  DETKERN_INLINE void multiply(float (&acc)[GROUP_N / 2], uint32_t stage, int step) const {
    const uint32_t offset = stage * (StageRing::STAGE_BYTES / 16);
    wgmma<GROUP_N, OPERAND, FROM_ZERO, TileA::TRANSPOSED, TileB::TRANSPOSED>(
        acc, TileA::descriptor(first_a_ + offset, TileA::offset(0, step)),
        TileB::descriptor(first_b_ + offset, TileB::offset(0, step)));
  }

  StageRing ring_;
  Position position_;
  bool ready_;                  // whether that stage is known to be full: asking takes long enough to do it beforehand
  uint32_t first_a_, first_b_;  // low words of the first stage's descriptors
};

// Writes outputs of the operands' type to which nothing is added, as the words are but for the contract's + 0. Returns
// whether they are of this kind, and lie so that words can be written.
DETKERN_INLINE bool store_words(const GemmParams& p, const OutputTile& tile, int row, int column,
                                const uint32_t (&node)[WORDS]) {
  const int64_t batch = batch_offset(p, p.out_batch, tile.batch);
  const bool odd =
      ((reinterpret_cast<uint64_t>(static_cast<uint16_t*>(p.out) + batch) & 2) | (p.out_row & 1) | (p.n & 1)) != 0;
  if (p.out_dtype != OPERAND || p.bias_dtype != NONE || p.accumulate || p.out_col != 1 || odd) return false;
  const RowPair<2> words(p, batch, tile.row + row, tile.column + column, GROUP_N);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) words.store(half, 8 * j, add_pair<OPERAND>(node[2 * j + half], 0));
  }
  return true;
}

// Writes any outputs, those from `own` on, through the levels' memory: it is free once all consumers are here, and
// theirs again once all have written.
DETKERN_INLINE void store_through_shared(const GemmParams& p, OutputTile tile, const OutputTile& own,
                                         unsigned char* slabs, const uint32_t (&node)[WORDS]) {
  named_barrier<CONSUMERS * GROUP>(1);
#pragma unroll
  for (int part = 0; part < WORDS * 4 / SLAB_N; ++part) {
    WarpOutput(p, slabs, tile, own).template store<true>([&](int, int j, int half) {
      const uint32_t word = node[(part * (SLAB_N / 8) + j) * 2 + half];
      return make_float2(upcast_low<OPERAND>(word), upcast_high<OPERAND>(word));
    });
    tile.column += SLAB_N;
  }
  named_barrier<CONSUMERS * GROUP>(1);
}

DETKERN_INLINE void consume(const GemmParams& p, const StageRing& ring, unsigned char* shared, int group,
                            uint32_t leaf_count) {
  const int row = group % GROUPS_M * 64, column = group / GROUPS_M * GROUP_N;
  Leaves leaves(ring, row, column);
  for (Walk tiles(p); tiles.more(); tiles.step()) {
    NodeWalk<NODE_LEAVES> walk(leaf_count);
    Sibling sibling(shared_address(shared) + SIBLING_AT);
    Levels levels(walk.depth() - 1, shared_address(shared) + LEVELS_AT, p.scratch);
    uint32_t half = 0;  // of its stage, that the next leaf is
    uint32_t size = walk.size();
    constexpr int ENDED = 255, LAST = 256, ROUND = 512;
    int state = leaves.is_round(size, half) ? ROUND : 0;  // in one register
    // All that is asked of the tree, about the next node as well: chains of dependent instructions, hidden here.
    const auto meanwhile = [&] {
      state = walk.nodes_ended() | (walk.at_last_node() ? LAST : 0);
      walk.step();
      half ^= size & 1;
      size = walk.size();
      state |= leaves.is_round(size, half) ? ROUND : 0;
      forget(state);
    };
    uint32_t node[WORDS];
#pragma unroll 1
    while (true) {
      if (Leaves::HAS_ROUNDS && (state & ROUND)) {
        leaves.gather_round(node, meanwhile);
      } else {
        leaves.gather_node(size, half, node, meanwhile);
      }
      const int ended = state & ENDED;
      const bool last = state & LAST;
      if (ended == 0) {
        if (last) break;
        sibling.put(node);
        continue;
      }
      sibling.add_to(node);
#pragma unroll 1
      for (int level = 0; level < ended - 1; ++level) levels.add(level, node);
      if (last) break;
      levels.put(ended - 1, node);
    }
    if (half != 0) leaves.leave_tile();

    const OutputTile output = tiles.output();
    if (!store_words(p, output, row, column, node)) {
      store_through_shared(p, output, tiles.own(), shared + SIBLING_AT, node);
    }
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
    if (CtaRoles::begin_producing(threadIdx.x / 32, ring, CONSUMING_WARPS, map_a, map_b)) {
      const Walk walk(p);
      produce<false, false>(ring, Position(), walk,
                            MatrixSource<TileA, TileB, TILE_K>(p, map_a, map_b, walk, (leaves + 1) / 2));
    }
  } else {
    CtaRoles::claim_registers();
    CtaRoles::begin_consuming();
    wait_for_earlier_grid();
    consume(p, ring, shared, group, leaves);
  }
}
