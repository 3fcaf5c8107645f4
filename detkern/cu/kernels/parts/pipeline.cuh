// What the warp-specialised kernels of sm_90a share: a ring of stages in shared memory that one thread fills by TMA and
// the consuming warps empty, the walk over output tiles, and the start of a grid behind an earlier one.
//
// A stage holds BLOCK_K k of A's rows and of B's. It goes round by two mbarriers: `full`, on which the copies count
// their bytes, and `empty`, on which each consuming warp arrives once it has read the stage.
#pragma once

#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

// For tests: 1 makes both roles sleep at random, 2 also empties a stage before it is read, which must show.
#ifndef JITTER
#define JITTER 0
#endif

// Sleeps up to two microseconds, at random.
DETKERN_INLINE void jitter(uint32_t salt) {
  if constexpr (JITTER != 0) {
    uint32_t clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    const uint32_t hash = (clock ^ salt ^ blockIdx.x << 16 ^ threadIdx.x / 32) * 0x9e3779b1u;
    if (hash >> 30 == 0) __nanosleep(hash >> 19 & 2047);
  }
}

// CTAS: that share stages, 1 or the 2 of a cluster; a stage is empty when all their consumers have read it.
template <class TileA, class TileB, int COUNT, int CTAS = 1>
struct Ring {
  static constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES;
  static constexpr int BARRIER_BYTES = 16 * COUNT;
  static_assert(TileA::BYTES % 1024 == 0 && STAGE_BYTES % 1024 == 0, "atoms must start at multiples of their size");

  uint32_t stages;    // shared-memory address, a multiple of 1024
  uint32_t barriers;  // BARRIER_BYTES, a multiple of 8

  DETKERN_INLINE uint32_t a(uint32_t stage) const { return stages + stage * STAGE_BYTES; }
  DETKERN_INLINE uint32_t b(uint32_t stage) const { return a(stage) + TileA::BYTES; }
  DETKERN_INLINE uint32_t full(uint32_t stage) const { return barriers + stage * 16; }
  DETKERN_INLINE uint32_t empty(uint32_t stage) const { return full(stage) + 8; }

  // Whether a stage's operands are there.
  template <class Position>
  DETKERN_INLINE bool full_already(const Position& position) const {
    return mbarrier_test(full(position.stage), position.parity);
  }

  // Waits for a stage's operands. known: that they are there.
  template <class Position>
  DETKERN_INLINE void take(const Position& position, bool known = false) const {
    if (!known) mbarrier_wait(full(position.stage), position.parity);
    if (JITTER == 2) empty_stage(position.stage);
    jitter(position.stage);
  }

  // This warp has read the stage.
  DETKERN_INLINE void release(uint32_t stage) const {
    if (JITTER != 2) empty_stage(stage);
  }

  // Waits, as the producer, until all stages are empty again: the other CTA's consumers arrive at this one's barriers
  // no more then, and it may end.
  template <class Position>
  DETKERN_INLINE void drain(Position position) const {
#pragma unroll 1
    for (int stage = 0; stage < COUNT; ++stage) {
      mbarrier_wait(empty(position.stage), position.parity ^ 1);
      position.step();
    }
  }

  // By one warp, before a barrier of the CTA. One thread makes them all: threads with a barrier each would take turns.
  DETKERN_INLINE void init(int consuming_warps) const {
    if (elected()) {
#pragma unroll
      for (int stage = 0; stage < COUNT; ++stage) {
        mbarrier_init(full(stage), 1);
        mbarrier_init(empty(stage), consuming_warps * CTAS);
      }
      fence_barrier_init();
    }
    __syncwarp();
  }

 private:
  DETKERN_INLINE void empty_stage(uint32_t stage) const {
    if constexpr (CTAS == 1) {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(stage));
    } else {
      if (threadIdx.x % 32 < CTAS) mbarrier_arrive_at(empty(stage), threadIdx.x % 32);
    }
  }
};

// One stage of the ring and the parity of its phase, going round.
template <int COUNT>
struct RingPosition {
  uint32_t stage = 0, parity = 0;

  DETKERN_INLINE void step() {
    stage = stage + 1 == COUNT ? 0 : stage + 1;
    parity ^= stage == 0;
  }

  DETKERN_INLINE RingPosition next() const {
    RingPosition result = *this;
    result.step();
    return result;
  }

  DETKERN_INLINE void advance(uint32_t steps) {
    const uint32_t total = stage + steps % (2 * COUNT);
    stage = total % COUNT;
    parity ^= total / COUNT & 1;
  }
};

// What the two CTAs of a cluster have in common: nothing (one CTA), the rows of A (their tiles lie beside one another)
// or the columns of B (below one another).
enum Shared : int { SHARED_NONE = 0, SHARED_A = 1, SHARED_B = 2 };

// The output tiles of a CTA: every gridDim.x-th, in bands of BAND tile rows as output_tile's. The CTAs of a cluster
// walk over pairs of tiles, and one of a pair may be outside the output. m, n and the number of tiles are below 2^31
// where operands come by TMA, so the divisions are of 32 bits: a grid of short chains waits for them.
// ROW_UNIT, COLUMN_UNIT: of which rows and columns that tiles start at are multiples: 8 where TMA copies along them or
// outputs are stored by 16 bytes. FEW_COLUMNS: of tiles, up to which a band is one row of tiles.
template <int TILE_ROWS, int TILE_COLUMNS, int TILE_BAND, int SHARED_OPERAND, int ROW_UNIT, int COLUMN_UNIT = 8,
          uint32_t FEW_COLUMNS = 0>
class TileWalk {
  static constexpr int CTAS = SHARED_OPERAND == SHARED_NONE ? 1 : 2;
  static constexpr int ROWS = SHARED_OPERAND == SHARED_B ? 2 * TILE_ROWS : TILE_ROWS;
  static constexpr int COLUMNS = SHARED_OPERAND == SHARED_A ? 2 * TILE_COLUMNS : TILE_COLUMNS;
  static constexpr int BAND_ROWS = SHARED_OPERAND == SHARED_B ? TILE_BAND / 2 : TILE_BAND;

 public:
  // Takes the CTA's tiles number `turn`, turn + turns, turn + 2 * turns and so on.
  DETKERN_INLINE explicit TileWalk(const GemmParams& p, uint32_t turn = 0, uint32_t turns = 1)
      : p_(p), turns_(turns), tile_(blockIdx.x / CTAS + gridDim.x / CTAS * turn) {}

  // Sizes are computed where they are needed, since they would take registers throughout the main loop otherwise.
  DETKERN_INLINE bool more() const { return tile_ < count(); }

  DETKERN_INLINE void step() { tile_ += gridDim.x / CTAS * turns_; }

  // The tile that is computed: the CTA's, moved back to where it lies inside of the output. Copies of rows that are not
  // there take longer than those of rows that are, and a neighbour's outputs come out as the same bits.
  DETKERN_INLINE OutputTile output() const {
    OutputTile tile = own();
    tile.row = min(tile.row, static_cast<int64_t>(last_start<ROW_UNIT>(p_.m, TILE_ROWS)));
    tile.column = min(tile.column, static_cast<int64_t>(last_start<COLUMN_UNIT>(p_.n, TILE_COLUMNS)));
    return tile;
  }

  // The CTA's own tile, which may reach beyond the output. Its outputs are those of output() from here on.
  DETKERN_INLINE OutputTile own() const {
    const uint32_t in_one = rows() * columns();
    const uint32_t batch = p_.batch_rank == 0 ? 0 : tile_ / in_one;
    const uint32_t in_batch = tile_ - batch * in_one;
    const uint32_t highest = FEW_COLUMNS != 0 && columns() <= FEW_COLUMNS ? 1 : BAND_ROWS;
    const uint32_t band = rows() <= highest ? 0 : in_batch / (highest * columns());
    const uint32_t in_band = in_batch - band * (highest * columns());
    const uint32_t height = min(highest, rows() - band * highest);
    const uint32_t column = height == 1 ? in_band : in_band / height;
    const uint32_t row = band * highest + (in_band - column * height);
    OutputTile tile = {batch, static_cast<int64_t>(row) * ROWS, static_cast<int64_t>(column) * COLUMNS};
    if (SHARED_OPERAND == SHARED_A) tile.column += blockIdx.x % CTAS * TILE_COLUMNS;
    if (SHARED_OPERAND == SHARED_B) tile.row += blockIdx.x % CTAS * TILE_ROWS;
    return tile;
  }

  // Of the output: tiles, or pairs of them.
  DETKERN_INLINE uint32_t rows() const { return (static_cast<uint32_t>(p_.m) + ROWS - 1) / ROWS; }

  DETKERN_INLINE uint32_t columns() const { return (static_cast<uint32_t>(p_.n) + COLUMNS - 1) / COLUMNS; }

 private:
  // Where the last tile of `extent` starts that lies inside of `size`, or at 0 a larger one; at a multiple of UNIT.
  template <int UNIT>
  static DETKERN_INLINE int last_start(int64_t size, int extent) {
    return max(static_cast<int>(size) - extent + UNIT - 1, 0) / UNIT * UNIT;
  }

  // Without a branch: behind one, what products read would not stay in uniform registers.
  DETKERN_INLINE uint32_t count() const {
    return rows() * columns() * static_cast<uint32_t>(p_.batch_shape[0]) * static_cast<uint32_t>(p_.batch_shape[1]);
  }

  const GemmParams& p_;
  uint32_t turns_, tile_;
};

enum class Role { PRODUCES, CONSUMES };

// The start of a CTA: its producing warp, which has made the barriers, does not wait for the consumers, these wait for
// it. To wait for the earlier grid is left to both. CTAS: of a cluster, where nobody arrives at another CTA's barriers
// before it has made them, so all wait for one another; mostly while the earlier grid still runs.
template <Role ROLE, int THREAD_COUNT, int CTAS = 1>
DETKERN_INLINE void start() {
  if constexpr (ROLE == Role::PRODUCES) {
    named_barrier_arrive<THREAD_COUNT>(2);
  } else {
    named_barrier<THREAD_COUNT>(2);
  }
  let_next_grid_start();
  if constexpr (CTAS > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

// Fills the ring with the `blocks` BLOCK_K-blocks of each of the CTA's tiles, by one thread. WAITS_IN_LOOP: for the
// earlier grid only where the first copy starts, so that all instructions before it are there already; a test each time
// that large tiles have no time for. AT_ONE_TIME: CTAs whose tiles lie below one another and that read B at one time.
template <class TileA, class TileB, int BLOCK_K, int SHARED_OPERAND = SHARED_NONE, bool WAITS_IN_LOOP = false,
          uint32_t AT_ONE_TIME = 1, class RingType, class Position, class Walk>
DETKERN_INLINE void produce(const GemmParams& p, const TensorMap& map_a, const TensorMap& map_b, const RingType& ring,
                            Position position, Walk walk, uint32_t blocks) {
  const bool whole_a = p.whole_boxes & WHOLE_A, whole_b = p.whole_boxes & WHOLE_B;
  // Filling rows outside A takes time, too: boxes that are copied one by one have no more than there are.
  const int rows_a = TileA::MN_ROWS || whole_a ? TileA::BOX_ROWS : static_cast<int>(min(p.m, int64_t(TileA::BOX_ROWS)));
  const int bytes = TileA::BYTES / TileA::BOX_ROWS * rows_a + TileB::BYTES;
  const bool batch_b = p.batch_rank != 0 && (p.b_batch[0] != 0 || (p.batch_rank == 2 && p.b_batch[1] != 0));
  const uint32_t rank = SHARED_OPERAND == SHARED_NONE ? 0 : cluster_rank();
  const bool once_b = walk.rows() <= AT_ONE_TIME && (batch_b || p.batch_rank == 0);
  OutputTile tile = walk.output();  // computed before the wait, which many a grid begins with
  forget(tile.row);
  forget(tile.column);
  BatchIndex batch(p, tile.batch);
  bool waits = WAITS_IN_LOOP && walk.more();
  if (!waits) wait_for_earlier_grid();
  while (walk.more()) {
#pragma unroll 1
    for (uint32_t block = 0; block < blocks; ++block) {
      mbarrier_wait(ring.empty(position.stage), position.parity ^ 1);
      jitter(block);
      const uint32_t full = ring.full(position.stage);
      mbarrier_arrive_expecting(full, bytes);
      if (waits) wait_for_earlier_grid();
      waits = false;
      const BatchIndex batch_of_a = batch.of(p, p.a_batch), batch_of_b = batch.of(p, p.b_batch);
      const int k = block * BLOCK_K;
      if constexpr (SHARED_OPERAND == SHARED_B) {
        TileB::template copy<Copy::TO_BOTH>(ring.b(position.stage), map_b, tile.column, k, batch_of_b, full, whole_b,
                                            rank);
      } else if (once_b) {
        TileB::template copy<Copy::ONCE>(ring.b(position.stage), map_b, tile.column, k, batch_of_b, full, whole_b);
      } else {
        TileB::template copy<Copy::PLAIN>(ring.b(position.stage), map_b, tile.column, k, batch_of_b, full, whole_b);
      }
      constexpr Copy COPY_A = SHARED_OPERAND == SHARED_A ? Copy::TO_BOTH : Copy::PLAIN;
      TileA::template copy<COPY_A>(ring.a(position.stage), map_a, tile.row, k, batch_of_a, full, whole_a, rank);
      position.step();
    }
    walk.step();
    if (walk.more()) {
      tile = walk.output();
      batch = BatchIndex(p, tile.batch);
    }
  }
  if (SHARED_OPERAND != SHARED_NONE) ring.drain(position);
}
