// PTX that CUDA C++ has no name for without the toolkit's headers, and the 16-bit arithmetic of the contracts. Section
// numbers are those of the PTX ISA 8.x.
#pragma once

#include "params.cuh"

#define DETKERN_INLINE __device__ __forceinline__

// Hides where a value came from: what is derived from it afterwards is derived anew.
DETKERN_INLINE void forget(int64_t& value) { asm volatile("" : "+l"(value)); }
DETKERN_INLINE void forget(int32_t& value) { asm volatile("" : "+r"(value)); }
template <typename Element>
DETKERN_INLINE void forget(Element*& value) {
  asm volatile("" : "+l"(value));
}

template <typename Element>
DETKERN_INLINE const Element* forgotten(const Element* pointer) {
  forget(pointer);
  return pointer;
}

// The thread's index in its CTA (10.1), read where it stands: a compiler may not move it, nor what follows from it.
DETKERN_INLINE int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The same value, from which a compiler must compute anew: for what is needed again only after a long loop, which would
// otherwise keep it in registers.
DETKERN_INLINE int64_t afresh(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// ---- shared memory ------------------------------------------------------------------------------------------------

DETKERN_INLINE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

DETKERN_INLINE void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DETKERN_INLINE void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Stores 16 rows of eight 16-bit elements, each row at the address that the lane of its number gives, from words as
// mma.sync lays them out: of rows g and g + 8 (stmatrix, 9.7.14.5.16; sm_90 and newer).
DETKERN_INLINE void store_matrices(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high)
               : "memory");
}

// The same of two pieces; lanes 16 and beyond give the addresses of the second one's rows.
DETKERN_INLINE void store_matrices(uint32_t address, uint32_t low, uint32_t high, uint32_t low2, uint32_t high2) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(low), "r"(high),
               "r"(low2), "r"(high2)
               : "memory");
}

// Stores the words of two pieces as columns: each lane gives the address of eight elements of one column. Lanes 0 to 7 those
// of `low`, 8 to 15 of `high`, and so on.
DETKERN_INLINE void store_matrices_transposed(uint32_t address, uint32_t low, uint32_t high, uint32_t low2,
                                              uint32_t high2) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(low),
               "r"(high), "r"(low2), "r"(high2)
               : "memory");
}

DETKERN_INLINE void store_matrices_transposed(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high)
               : "memory");
}

// Stores 16 bytes to global memory where `there` says so. Left to itself a compiler takes some of them apart.
DETKERN_INLINE void store_global_if(bool there, void* target, uint4 value) {
  asm volatile(
      "{.reg .pred there; setp.ne.b32 there, %0, 0; @there st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(
          static_cast<int>(there)),
      "l"(__cvta_generic_to_global(target)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

DETKERN_INLINE uint4 load_shared_v4(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Loads COUNT neighbouring elements, which are of 2 or 4 bytes each; two of 2 bytes come in one word, a single one in
// the low half.
template <int ELEMENT_BYTES, int COUNT>
DETKERN_INLINE void load_shared(uint32_t address, uint32_t* words) {
  constexpr int BYTES = ELEMENT_BYTES * COUNT;
  static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "one instruction");
  if constexpr (BYTES == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
  } else {
    const uint4 value = load_shared_v4(address);
    words[0] = value.x, words[1] = value.y, words[2] = value.z, words[3] = value.w;
  }
}

// ---- global memory ------------------------------------------------------------------------------------------------

// A 16-byte or 8-byte aligned load under a predicate; `words` keeps what it held where not `wanted`.
DETKERN_INLINE void load_global_if(bool wanted, const void* source, uint32_t (&words)[4]) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
               : "l"(source), "r"(static_cast<int>(wanted)));
}

DETKERN_INLINE void load_global_if(bool wanted, const void* source, uint32_t (&words)[2]) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
               : "+r"(words[0]), "+r"(words[1])
               : "l"(source), "r"(static_cast<int>(wanted)));
}

// A load under a predicate, else +0, done where it stands.
DETKERN_INLINE float load_global_if(bool wanted, const float* source) {
  float value = 0.0f;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.f32 %0, [%1];}"
               : "+f"(value)
               : "l"(source), "r"(static_cast<int>(wanted)));
  return value;
}

// Asks the L2 cache for the 128 bytes around an address (9.7.9.15).
DETKERN_INLINE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// ---- asynchronous copies (9.7.9.25.3) -----------------------------------------------------------------------------

// Copies `bytes` (0 to 16) of a 16-byte aligned chunk and fills the rest of the 16 with zeros; nothing is read for 0.
DETKERN_INLINE void copy_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

DETKERN_INLINE void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

DETKERN_INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are in flight.
template <int PENDING>
DETKERN_INLINE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- matrix fragments (9.7.14.5) ----------------------------------------------------------------------------------

DETKERN_INLINE void load_matrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

DETKERN_INLINE void load_matrix_x4_transposed(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// acc += A B on a 16 x 8 tile, one step of 16 k: A 16 x 16 by rows, B 16 x 8 by columns.
template <int DTYPE>
DETKERN_INLINE void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "mma.sync m16n8k16 is used for f16 and bf16");
  if constexpr (DTYPE == BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// acc += A B on a 16 x 8 tile, one step of 8 k: A 16 x 8 by rows, B 8 x 8 by columns.
template <int DTYPE>
DETKERN_INLINE void mma_m16n8k8(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "mma.sync m16n8k8 is used for f16 and bf16");
  if constexpr (DTYPE == BF16) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b0));
  } else {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b0));
  }
}

// ---- 16-bit numbers -----------------------------------------------------------------------------------------------

// The binary32 value of a 16-bit number, exactly; subnormals kept.
template <int DTYPE>
DETKERN_INLINE float upcast(uint32_t bits) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "upcast takes 16-bit numbers");
  float value;
  if constexpr (DTYPE == BF16) {
    value = __uint_as_float(bits << 16);
  } else {
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  }
  return value;
}

// The binary32 values of the low and the high half of a word.
template <int DTYPE>
DETKERN_INLINE float upcast_low(uint32_t pair) {
  return upcast<DTYPE>(DTYPE == BF16 ? pair : pair & 0xffffu);
}

template <int DTYPE>
DETKERN_INLINE float upcast_high(uint32_t pair) {
  if constexpr (DTYPE == BF16) {
    return __uint_as_float(pair & 0xffff0000u);
  } else {
    return upcast<DTYPE>(pair >> 16);
  }
}

// Two binary32 values rounded to nearest even to 16 bits each (9.7.9.21); a NaN becomes 0x7fff.
template <int DTYPE>
DETKERN_INLINE uint32_t round_pair(float low, float high) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "round_pair gives 16-bit numbers");
  uint32_t pair;
  if constexpr (DTYPE == BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <int DTYPE>
DETKERN_INLINE uint16_t round_one(float value) {
  return static_cast<uint16_t>(round_pair<DTYPE>(value, 0.0f));
}

// Two 16-bit sums, each as if added in binary32 and rounded: 24 >= 2p + 2 makes the double rounding innocuous (p = 11,
// 8; Figueroa 1995), and sums too small for normal numbers are exact. bf16 has an add of its own from sm_90 on only, so
// its sum is left * 1 + right, which rounds once as well; a NaN becomes 0x7fff.
template <int DTYPE>
DETKERN_INLINE uint32_t add_pair(uint32_t left, uint32_t right) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "add_pair takes 16-bit numbers");
  uint32_t sum;
  if constexpr (DTYPE == BF16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(left), "r"(0x3f803f80u), "r"(right));
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(left), "r"(right));
  }
  return sum;
}

// ---- warp groups and their barriers (sm_90 and newer) -------------------------------------------------------------

// The registers a thread of this warp group may have from here on (9.7.19.5): fewer than at launch, or more.
template <int COUNT>
DETKERN_INLINE void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DETKERN_INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

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

// ---- clusters (sm_90 and newer) -----------------------------------------------------------------------------------

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

// ---- tensor copies (sm_90 and newer, 9.7.9.25.5) --------------------------------------------------------------------

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

// ---- grids behind one another (sm_90 and newer, 9.7.13.13) ----------------------------------------------------------

// Waits until the grids that this one was launched behind are complete and their writes are seen. Nothing is read or
// written before that another grid may write or read. At once where the launch was an ordinary one.
DETKERN_INLINE void wait_for_earlier_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A grid launched behind this one may start; it still waits for all of this one.
DETKERN_INLINE void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
