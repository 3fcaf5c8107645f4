// What the CUDA-core kernels use of ptx/, on the host, for tests of their index arithmetic, their rings of stages and
// their barriers. It takes the place of those headers beside copies of the kernel's other files; threads are fibers.
//
// An asynchronous copy takes place when it is started (EARLY), or when a thread waits for its group and no sooner
// (LATE): a kernel that is right is right under both, and in both orders in which the fibers run between barriers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "fibers.h"
#include "ptx/types.cuh"

#define __device__
#define __global__
#ifndef __shared__  // static in kernels that declare what they share
#define __shared__
#endif
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DETKERN_INLINE inline

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y;
};
#define threadIdx dim3({static_cast<unsigned>(emulation::thread()), 0})
inline dim3 blockIdx, gridDim;
extern __attribute__((aligned(16))) char shared[];

namespace emulation {

struct AsyncCopy {
  uint32_t target;
  const void* source;
  int bytes;
};
inline bool late;
inline const char *readable[2], *readable_end[2];  // the operands
inline std::vector<std::deque<std::vector<AsyncCopy>>> groups;  // of each thread, the newest last

inline void complete(const AsyncCopy& copy) {
  const char* source = static_cast<const char*>(copy.source);
  bool inside = copy.bytes == 0;
  for (int i = 0; i < 2; ++i) inside |= source >= readable[i] && source + copy.bytes <= readable_end[i];
  if (!inside || reinterpret_cast<uintptr_t>(source) % 16 != 0 || copy.target % 16 != 0) {
    std::fprintf(stderr, "a copy outside its operand, or misaligned\n");
    std::abort();
  }
  std::memset(shared + copy.target, 0, 16);
  std::memcpy(shared + copy.target, source, copy.bytes);
}

inline int thread() { return Fibers::of_this_thread().index(); }

}  // namespace emulation

inline void __syncthreads() { emulation::Fibers::of_this_thread().barrier(); }

// Arrivals at each named barrier, since it was made. Who waits lets the other threads run until its turn is complete.
inline int64_t& arrivals(int barrier) {
  static thread_local int64_t counts[16];
  return counts[barrier];
}
template <int THREAD_COUNT>
void named_barrier_arrive(int barrier) {
  ++arrivals(barrier);
}
template <int THREAD_COUNT>
void named_barrier(int barrier) {
  const int64_t complete = (arrivals(barrier)++ / THREAD_COUNT + 1) * THREAD_COUNT;
  while (arrivals(barrier) < complete) emulation::Fibers::of_this_thread().barrier();
}
inline void wait_for_earlier_grid() {}
inline int thread_index() { return emulation::thread(); }

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float canonical(float value) { return value == value ? value : __uint_as_float(0x7fffffff); }
inline float __fmaf_rn(float a, float b, float c) { return canonical(std::fma(a, b, c)); }
inline float __fadd_rn(float a, float b) { return canonical(a + b); }
inline float __fmul_rn(float a, float b) { return canonical(a * b); }
inline float __fdiv_rn(float a, float b) { return canonical(a / b); }
inline float approximate_reciprocal(float a) { return 1.0f / a; }
inline float __frcp_rn(float a) { return canonical(1.0f / a); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
using std::copysign;

// All threads of the block that have not ended come here together, those of other warps too.
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  static float given[1024];
  const int thread = emulation::thread();
  given[thread] = value;
  emulation::Fibers::of_this_thread().barrier();
  const float found = given[thread ^ lanes];
  emulation::Fibers::of_this_thread().barrier();
  return found;
}
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename Element>
const Element* forgotten(const Element* pointer) {
  return pointer;
}

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared);
}
inline void store_shared(uint32_t address, uint32_t value) { std::memcpy(shared + address, &value, 4); }
inline void store_shared(uint32_t address, uint4 value) { std::memcpy(shared + address, &value, 16); }
inline uint4 load_shared_v4(uint32_t address) {
  uint4 value;
  std::memcpy(&value, shared + address, 16);
  return value;
}
template <int ELEMENT_BYTES, int COUNT>
void load_shared(uint32_t address, uint32_t* words) {
  constexpr int BYTES = ELEMENT_BYTES * COUNT;
  if (address % BYTES != 0) std::abort();
  words[0] = 0;
  std::memcpy(words, shared + address, BYTES);
}

inline float load_global_if(bool wanted, const float* source) { return wanted ? *source : 0.0f; }
template <int COUNT>
void load_global_if(bool wanted, const void* source, uint32_t (&words)[COUNT]) {
  if (wanted) std::memcpy(words, source, 4 * COUNT);
}

inline void copy_async_16(uint32_t target, const void* source, int bytes = 16) {
  const emulation::AsyncCopy copy = {target, source, bytes};
  if (emulation::late) {
    emulation::groups[emulation::thread()].back().push_back(copy);
  } else {
    emulation::complete(copy);
  }
}
inline void copy_async_commit() { emulation::groups[emulation::thread()].emplace_back(); }
template <int PENDING>
void copy_async_wait() {
  auto& groups = emulation::groups[emulation::thread()];
  while (groups.size() > PENDING + 1) {  // the last one is not committed
    for (const emulation::AsyncCopy& copy : groups.front()) emulation::complete(copy);
    groups.pop_front();
  }
}

template <int DTYPE>
float upcast(uint32_t bits) {
  if (DTYPE == BF16) return __uint_as_float(bits << 16);
  const uint16_t half = static_cast<uint16_t>(bits);
  _Float16 value;
  std::memcpy(&value, &half, 2);
  return static_cast<float>(value);
}
template <int DTYPE>
float upcast_low(uint32_t pair) {
  return upcast<DTYPE>(pair & 0xffffu);
}
template <int DTYPE>
float upcast_high(uint32_t pair) {
  return upcast<DTYPE>(pair >> 16);
}
template <int DTYPE>
uint16_t round_one(float value) {
  if (value != value) return 0x7fff;
  if (DTYPE == BF16) {
    const uint32_t bits = __float_as_uint(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
