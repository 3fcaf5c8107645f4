// Registers: what a compiler may know of them, and how many a thread has. Section numbers are those of the PTX ISA 8.x.
#pragma once

#include "ptx/types.cuh"

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

// target = value where `wanted`. One of many values chosen so stays in a register: of a choice in C++ a compiler makes
// an address, and of what is chosen from an array in memory.
DETKERN_INLINE void set_if(bool wanted, float& target, float value) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mov.b32 %0, %2;}"
               : "+f"(target)
               : "r"(static_cast<int>(wanted)), "f"(value));
}

// Keeps a compiler from moving accesses to accumulators across the place where it stands.
template <int COUNT>
DETKERN_INLINE void hold(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// The registers a thread of this warp group may have from here on (9.7.19.5): fewer than at launch, or more.
template <int COUNT>
DETKERN_INLINE void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DETKERN_INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
