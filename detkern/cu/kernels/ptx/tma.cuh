// Copies of boxes of a tensor by TMA, sm_90 and newer. Section numbers are those of the PTX ISA 8.x.
#pragma once

#include "ptx/types.cuh"

// A tensor map, as cuTensorMapEncodeTiled makes it; a kernel's __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

DETKERN_INLINE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// How a box is copied. ONCE: nobody reads it later, so the L2 cache need not keep it (createpolicy, 9.7.9.17). Only for
// that is the cache told anything: with a policy of evict_normal lines that many CTAs read came at half the rate.
// TO_BOTH: into both CTAs of a cluster of two, at one offset in the memory of each, with the barrier of each.
enum class Copy { PLAIN, ONCE, TO_BOTH };

// Starts the copy of the box at (x, y, z, w) of a map of four dimensions to shared memory; `barrier` counts its bytes.
template <Copy COPY>
DETKERN_INLINE void copy_tensor_box(uint32_t target, const TensorMap& map, int x, int y, int z, int w,
                                    uint32_t barrier) {
  if constexpr (COPY == Copy::PLAIN) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
  } else if constexpr (COPY == Copy::ONCE) {
    asm volatile(
        "{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], policy;}" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(static_cast<uint16_t>(3))
        : "memory");
  }
}

// Starts the copy of a box in shared memory to (x, y, z, w) of a map; what is outside the tensor is dropped. The
// thread's copies of this kind go in groups.
DETKERN_INLINE void store_tensor_box(const TensorMap& map, int x, int y, int z, int w, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

DETKERN_INLINE void store_tensor_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's boxes have been read from shared memory.
DETKERN_INLINE void store_tensor_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
