// Filling a ring of stages: what a stage is filled with, and the loop that fills it, by one thread.
#pragma once

#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/schedule.cuh"
#include "parts/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

// What stages hold of products of matrices: the k-th part of A's rows and of B's columns at a tile. BLOCK_K: k of a
// stage. SHARED_OPERAND: what the CTAs of a cluster copy for one another. AT_ONE_TIME: CTAs whose tiles lie below one
// another and that read B at one time. NARROWS: where lines have fewer than ATOM elements, or chains fewer k, boxes
// have no more than there is, in steps of wgmma along k and in 16 bytes else: zeros outside of an operand take TMA
// about ten times as long as what is there. What a stage has beyond is left as it was: outputs that are not there, or k
// that are zeros from the start (clear_for_few).
//
// Another kernel may have another source: `seek` goes to a tile, which has `blocks()` stages of `bytes()`, and `fill`
// starts the copies of one of them.
template <class TileA, class TileB, int BLOCK_K, int SHARED_OPERAND = SHARED_NONE, uint32_t AT_ONE_TIME = 1,
          bool NARROWS = false>
class MatrixSource {
  static_assert(!NARROWS || SHARED_OPERAND == SHARED_NONE, "parts of boxes that are shared have one size");

 public:
  // blocks: stages of a chain. map_rest: of B, where TileB has a REST.
  template <class Walk>
  DETKERN_INLINE MatrixSource(const GemmParams& p, const TensorMap& map_a, const TensorMap& map_b, const Walk& walk,
                              uint32_t blocks, const TensorMap* map_rest = nullptr)
      : p_(p), map_a_(map_a), map_b_(map_b), map_rest_(map_rest), blocks_(blocks) {
    whole_a_ = p.whole_boxes & WHOLE_A, whole_b_ = p.whole_boxes & WHOLE_B;
    // Filling rows outside A takes time, too: boxes that are copied one by one have no more than there are.
    const int rows_a =
        TileA::MN_ROWS || whole_a_ ? TileA::BOX_ROWS : static_cast<int>(min(p.m, int64_t(TileA::BOX_ROWS)));
    bytes_ = bytes_of<TileA>(rows_a, p.m, p.k) + bytes_of<TileB>(TileB::BOX_ROWS, p.n, p.k);
    few_a_ = NARROWS && (TileA::MN_ROWS ? p.m : p.k) < ATOM;
    few_b_ = NARROWS && (TileB::MN_ROWS ? p.n : p.k) < ATOM;
    const bool batch_b =
        p.batch_rank != 0 && p.b_shared == 1 && (p.b_batch[0] != 0 || (p.batch_rank == 2 && p.b_batch[1] != 0));
    rank_ = SHARED_OPERAND == SHARED_NONE ? 0 : cluster_rank();
    once_b_ = walk.rows() <= AT_ONE_TIME && (batch_b || p.batch_rank == 0);
  }

  DETKERN_INLINE void seek(const OutputTile& tile) {
    tile_ = tile;
    const BatchIndex batch(p_, tile.batch);
    batch_of_a_ = batch.of(p_, p_.a_batch, p_.a_shared);
    batch_of_b_ = batch.of(p_, p_.b_batch, p_.b_shared);
  }

  // Before the first stage is filled, by the producing warp, of the stages that the walk's tiles will go through: sets
  // them to zero where chains have fewer k than a box.
  template <class RingType, class Walk>
  static DETKERN_INLINE void clear_for_few(const GemmParams& p, const RingType& ring, Walk walk) {
    if (!NARROWS || p.k >= ATOM) return;
    uint32_t count = 0;
    for (; count < RingType::STAGE_COUNT && walk.more(); ++count) walk.step();
    ring.clear(count);
  }

  DETKERN_INLINE uint32_t blocks() const { return blocks_; }
  DETKERN_INLINE int bytes() const { return bytes_; }

  // Starts the copies of stage `block` of the tile to the ring's; `full` counts their bytes.
  template <class RingType>
  DETKERN_INLINE void fill(const RingType& ring, uint32_t stage, uint32_t block, uint32_t full) const {
    const int k = block * BLOCK_K;
    if constexpr (SHARED_OPERAND == SHARED_B) {
      TileB::template copy<Copy::TO_BOTH>(ring.b(stage), map_b_, tile_.column, k, batch_of_b_, full, whole_b_, rank_);
    } else if (once_b_) {
      TileB::template copy<Copy::ONCE>(ring.b(stage), map_b_, tile_.column, k, batch_of_b_, full, whole_b_, 0, few_b_);
    } else {
      TileB::template copy<Copy::PLAIN>(ring.b(stage), map_b_, tile_.column, k, batch_of_b_, full, whole_b_, 0, few_b_);
    }
    if constexpr (TileB::REST > 0) {
      if (TileB::BOXES == 0 || !few_b_) TileB::copy_rest(ring.b(stage), *map_rest_, tile_.column, k, batch_of_b_, full);
    }
    constexpr Copy COPY_A = SHARED_OPERAND == SHARED_A ? Copy::TO_BOTH : Copy::PLAIN;
    TileA::template copy<COPY_A>(ring.a(stage), map_a_, tile_.row, k, batch_of_a_, full, whole_a_, rank_, few_a_);
  }

 private:
  // That copies bring to a stage. rows: of a box of a K_MAJOR tile; mn: the size of the operand beside k.
  template <class Tile>
  static DETKERN_INLINE int bytes_of(int rows, int64_t mn, int64_t k) {
    const bool few_k = NARROWS && k < ATOM;
    const int steps = (static_cast<int>(k) + 15) / 16;
    if (!Tile::MN_ROWS) return few_k ? rows * steps * 32 : Tile::BYTES / Tile::BOX_ROWS * rows;
    const int line = NARROWS && mn < ATOM ? min((static_cast<int>(mn) + 7) / 8 * 8, Tile::LINES) : Tile::LINES;
    return line * Tile::ELEMENT_BYTES * (few_k ? steps * 16 : Tile::BOX_ROWS);
  }

  const GemmParams& p_;
  const TensorMap& map_a_;
  const TensorMap& map_b_;
  const TensorMap* map_rest_;
  uint32_t blocks_, rank_;
  int bytes_;
  bool whole_a_, whole_b_, once_b_, few_a_, few_b_;
  OutputTile tile_;
  BatchIndex batch_of_a_, batch_of_b_;
};

// Fills the ring with the stages of each of the walk's tiles, by one thread. WAITS_IN_LOOP: for the earlier grid only
// where the first copy starts, so that all instructions before it are there already; a test each time that large tiles
// have no time for. DRAINS: the ring is a cluster's, and no CTA may end before all have read what it copied for them.
template <bool WAITS_IN_LOOP, bool DRAINS, class RingType, class Position, class Walk, class Source>
DETKERN_INLINE void produce(const RingType& ring, Position position, Walk walk, Source source) {
  OutputTile tile = walk.output();  // computed before the wait, which many a grid begins with
  forget(tile.row);
  forget(tile.column);
  source.seek(tile);
  bool waits = WAITS_IN_LOOP && walk.more();
  if (!waits) wait_for_earlier_grid();
  while (walk.more()) {
#pragma unroll 1
    for (uint32_t block = 0; block < source.blocks(); ++block) {
      mbarrier_wait(ring.empty(position.stage), position.parity ^ 1);
      ring.jitter(block);
      const uint32_t full = ring.full(position.stage);
      mbarrier_arrive_expecting(full, source.bytes());
      if (waits) wait_for_earlier_grid();
      waits = false;
      source.fill(ring, position.stage, block, full);
      position.step();
    }
    walk.step();
    if (walk.more()) source.seek(walk.output());
  }
  if (DRAINS) ring.drain(position);
}
