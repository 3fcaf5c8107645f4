// A ring of stages in shared memory that one thread fills by TMA and the consuming warps of Hopper's kernels empty.
//
// A stage holds some k of A's rows and of B's. It goes round by two mbarriers: `full`, on which the copies count their
// bytes, and `empty`, on which each consuming warp arrives once it has read the stage.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

// For tests of races: both roles may sleep at random, and a stage be emptied before it is read, which must show.
enum class Sleep : int { NEVER = 0, AT_RANDOM = 1, EMPTIES_TOO_SOON = 2 };

// CTAS: that share stages, 1 or the 2 of a cluster; a stage is empty when all their consumers have read it. SLEEPS:
// for tests.
template <class TileA, class TileB, int COUNT, int CTAS = 1, Sleep SLEEPS = Sleep::NEVER>
struct Ring {
  static constexpr int STAGE_COUNT = COUNT;
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
    if (SLEEPS == Sleep::EMPTIES_TOO_SOON) empty_stage(position.stage);
    jitter(position.stage);
  }

  // This warp has read the stage.
  DETKERN_INLINE void release(uint32_t stage) const {
    if (SLEEPS != Sleep::EMPTIES_TOO_SOON) empty_stage(stage);
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

  // By one warp, before a barrier of the CTA: sets the first `count` stages to zero, as products will read them.
  DETKERN_INLINE void clear(uint32_t count) const {
    for (uint32_t at = threadIdx.x % 32 * 16; at < count * STAGE_BYTES; at += 32 * 16) {
      store_shared(stages + at, make_uint4(0, 0, 0, 0));
    }
    fence_async_proxy();
    __syncwarp();
  }

  // Sleeps up to two microseconds, at random.
  static DETKERN_INLINE void jitter(uint32_t salt) {
    if constexpr (SLEEPS != Sleep::NEVER) {
      uint32_t clock;
      asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
      const uint32_t hash = (clock ^ salt ^ blockIdx.x << 16 ^ threadIdx.x / 32) * 0x9e3779b1u;
      if (hash >> 30 == 0) __nanosleep(hash >> 19 & 2047);
    }
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
