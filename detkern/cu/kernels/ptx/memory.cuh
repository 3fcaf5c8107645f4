// Shared and global memory, and copies from one to the other without TMA. Section numbers are those of the PTX ISA 8.x.
#pragma once

#include "ptx/types.cuh"

// ---- shared memory -------------------------------------------------------------------------------------------------

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

// ---- global memory -------------------------------------------------------------------------------------------------

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

// 8 aligned bytes that an earlier grid may just have written. The L2 cache is asked for their whole line of 128
// (9.7.9.8), of which the others come next.
DETKERN_INLINE float2 load_global_line(const float2* source) {
  float2 value;
  asm volatile("ld.global.L2::128B.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(source) : "memory");
  return value;
}

// Stores 16 bytes to global memory where `there` says so. Left to itself a compiler takes some of them apart.
DETKERN_INLINE void store_global_if(bool there, void* target, uint4 value) {
  asm volatile(
      "{.reg .pred there; setp.ne.b32 there, %0, 0; @there st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(
          static_cast<int>(there)),
      "l"(__cvta_generic_to_global(target)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

// Stores 16 bytes that nobody will read soon.
DETKERN_INLINE void store_streaming(float4* target, float4 value) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// Asks the L2 cache for the 128 bytes around an address (9.7.9.15).
DETKERN_INLINE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// ---- asynchronous copies (9.7.9.25.3) ------------------------------------------------------------------------------

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
