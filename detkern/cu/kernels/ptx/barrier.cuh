// Who waits for whom: warps of a CTA, CTAs of a cluster, grids. Section numbers are those of the PTX ISA 8.x.
#pragma once

#include "ptx/types.cuh"

// ---- named barriers and mbarriers (sm_90 and newer but for the first) ----------------------------------------------

// A barrier of THREAD_COUNT threads (9.7.13.1); barrier 0 is __syncthreads().
template <int THREAD_COUNT>
DETKERN_INLINE void named_barrier(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREAD_COUNT) : "memory");
}

// Arrives at a barrier without waiting there; `THREAD_COUNT` threads do one or the other.
template <int THREAD_COUNT>
DETKERN_INLINE void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREAD_COUNT) : "memory");
}

// True in one thread of a warp, all of whose threads are here (9.7.13.6). The compiler knows that it is one: in a
// branch of `threadIdx.x % 32 == 0` it puts a loop over the threads around each TMA copy.
DETKERN_INLINE bool elected() {
  uint32_t one;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(one));
  return one != 0;
}

// What this thread wrote to shared memory is seen by wgmma and TMA (9.7.13.4).
DETKERN_INLINE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Transaction barriers of 8 bytes in shared memory (9.7.13.15); a phase ends with `arrivals` arrivals.
DETKERN_INLINE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DETKERN_INLINE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and has the phase wait for `bytes` more that bulk copies will write (9.7.13.15.13).
DETKERN_INLINE void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// What one thread's mbarrier_init wrote is seen by the asynchronous proxy (9.7.13.4).
DETKERN_INLINE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_proxy();
}

// Whether the phase of this parity has ended.
DETKERN_INLINE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
               : "=r"(ended)
               : "r"(barrier), "r"(parity)
               : "memory");
  return ended != 0;
}

// Waits for the end of the phase of this parity: the first has 0; before it, the one of parity 1 counts as ended.
DETKERN_INLINE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!ended);
}

// ---- clusters (sm_90 and newer) ------------------------------------------------------------------------------------

DETKERN_INLINE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What was written before the arrival of one thread is seen after the wait of another (9.7.13.3). The arrival is a
// fence of the whole GPU.
DETKERN_INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// The same without a fence: of what was written before only the barriers are seen that fence_barrier_init has told of.
DETKERN_INLINE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

DETKERN_INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Arrives at the barrier that CTA `rank` of the cluster has at this address (9.7.13.15.13), a release within the CTA
// alone: of the cluster it would be a fence of the GPU.
DETKERN_INLINE void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::
          "r"(barrier),
      "r"(rank)
      : "memory");
}

// ---- grids behind one another (sm_90 and newer, 9.7.13.13) ---------------------------------------------------------

// Waits until the grids that this one was launched behind are complete and their writes are seen. Nothing is read or
// written before that another grid may write or read. At once where the launch was an ordinary one.
DETKERN_INLINE void wait_for_earlier_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A grid launched behind this one may start; it still waits for all of this one.
DETKERN_INLINE void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
