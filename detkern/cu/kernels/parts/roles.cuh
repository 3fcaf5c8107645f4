// The roles of a CTA's warps in Hopper's kernels: warp groups consume stages, one warp more fills them.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

constexpr int GROUP = 128;        // threads of a warp group
constexpr int GROUP_BARRIER = 3;  // and so on: named barriers, one a consumer

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

// CONSUMER_COUNT: warp groups that consume. THREAD_COUNT: of a CTA: the consumers' and the producer's warp, or a warp
// group of it, which gives the consumers registers. CTAS_AT_ONCE: of an SM. LEFT_REGISTERS: what a thread of that
// group keeps. CTAS: of a cluster that shares stages.
template <int CONSUMER_COUNT, int THREAD_COUNT, int CTAS_AT_ONCE, int LEFT_REGISTERS, int CTAS = 1>
struct Roles {
  static constexpr int WARPS = 4 * CONSUMER_COUNT;  // that consume
  static constexpr int STARTING_THREADS = (WARPS + 1) * 32;
  // A warp group of producers gives the consumers registers; one warp, where these need none, has not got any to give.
  static constexpr bool SHIFTS_REGISTERS = CONSUMER_COUNT > 1 && THREAD_COUNT == (CONSUMER_COUNT + 1) * GROUP;
  static constexpr int LAUNCH_REGISTERS = 65536 / THREAD_COUNT / CTAS_AT_ONCE / 8 * 8;
  static constexpr int CONSUMER_REGISTERS =
      (LAUNCH_REGISTERS * (CONSUMER_COUNT + 1) - LEFT_REGISTERS) / CONSUMER_COUNT / 8 * 8;
  static_assert(SHIFTS_REGISTERS || THREAD_COUNT == CONSUMER_COUNT * GROUP + 32,
                "one more warp than the consumers', or four");

  // By the warps that do not consume: makes the ring's barriers. True in the one thread that fills it. warp: of the
  // CTA. stage_warps: that read a stage.
  template <class RingType>
  static DETKERN_INLINE bool begin_producing(int warp, const RingType& ring, int stage_warps, const TensorMap& map_a,
                                             const TensorMap& map_b) {
    if constexpr (SHIFTS_REGISTERS) give_up_registers<LEFT_REGISTERS>();
    if (warp > WARPS) return false;
    if (elected()) {
      prefetch_tensor_map(map_b);
      prefetch_tensor_map(map_a);
    }
    ring.init(stage_warps);
    start<Role::PRODUCES, STARTING_THREADS, CTAS>();
    return elected();
  }

  // By the warps that consume, in this order; what needs no stage may stand between.
  static DETKERN_INLINE void claim_registers() {
    if constexpr (SHIFTS_REGISTERS) take_registers<CONSUMER_REGISTERS>();
  }

  static DETKERN_INLINE void begin_consuming() { start<Role::CONSUMES, STARTING_THREADS, CTAS>(); }
};
