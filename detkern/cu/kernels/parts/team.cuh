// Reductions over the threads that hold one row of rows.cu: a warp, a CTA, the CTAs of a cluster, or the same lane of
// all warps. All of them may combine in any order, because what they combine (largest numbers, sums of integers) does
// not depend on it.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

// The larger of two, or NaN where one is.
DETKERN_INLINE float larger(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// Writes to the same address of another CTA's shared memory (9.7.9.23, 9.7.9.12).
DETKERN_INLINE void store_remote(uint32_t address, uint32_t rank, uint32_t value) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}

// ---- what is reduced ----------------------------------------------------------------------------------------------

struct Largest {
  float value;
  DETKERN_INLINE void combine(const Largest& other) { value = larger(value, other.value); }
};

// Of numbers the largest, and of their negatives; NaN where one is.
struct Extent {
  float most, least;
  DETKERN_INLINE void combine(const Extent& other) {
    most = larger(most, other.most);
    least = larger(least, other.least);
  }
};

struct Sum {
  int64_t value;
  DETKERN_INLINE void add(int64_t other) { value += other; }
  DETKERN_INLINE void combine(const Sum& other) { value += other.value; }
};

// A sum of 128 bits, in two's complement.
struct WideSum {
  uint64_t low;
  int64_t high;
  DETKERN_INLINE void add(int64_t other) { combine({static_cast<uint64_t>(other), other >> 63}); }
  DETKERN_INLINE void combine(const WideSum& other) {
    low += other.low;
    high += other.high + (low < other.low);
  }
};

template <class T>
DETKERN_INLINE T shuffled(const T& value, int mask) {
  constexpr int WORDS = sizeof(T) / 4;
  union {
    T whole;
    uint32_t words[WORDS];
  } own{value}, other;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) other.words[w] = __shfl_xor_sync(0xffffffffu, own.words[w], mask);
  return other.whole;
}

// Over COUNT adjacent lanes, a power of two; each of them gets the result.
template <int COUNT, class T>
DETKERN_INLINE void combine_lanes(T& value) {
#pragma unroll
  for (int mask = COUNT / 2; mask > 0; mask /= 2) value.combine(shuffled(value, mask));
}

// ---- teams --------------------------------------------------------------------------------------------------------

// Room for one reduction. A team takes two of them in turn, so that nobody writes what another still reads.
template <class T, int WARPS, int CTAS, bool BY_LANE>
struct Room {
  T warps[BY_LANE ? WARPS * 32 : WARPS];
  T ctas[CTAS];
};

// Every thread of the team gets the result. WARPS: of the team in one CTA; BY_LANE: the team is a lane of all warps.
template <int WARPS, int CTAS, bool BY_LANE, class T>
DETKERN_INLINE T combine_team(T value, Room<T, WARPS, CTAS, BY_LANE>& room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (BY_LANE) {
    room.warps[threadIdx.x] = value;
    __syncthreads();
    value = room.warps[lane];
#pragma unroll 4
    for (int w = 1; w < WARPS; ++w) value.combine(room.warps[w * 32 + lane]);
    return value;
  }
  combine_lanes<32>(value);
  if constexpr (WARPS > 1) {
    if (lane == 0) room.warps[warp] = value;
    __syncthreads();
    value = room.warps[lane % WARPS];
    combine_lanes<WARPS>(value);
  }
  if constexpr (CTAS > 1) {
    if (threadIdx.x < CTAS) {
      union {
        T whole;
        uint32_t words[sizeof(T) / 4];
      } own{value};
      const uint32_t address = shared_address(&room.ctas[cluster_rank()]);
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(T) / 4); ++w) {
        store_remote(address + 4 * w, threadIdx.x, own.words[w]);
      }
    }
    cluster_arrive();
    cluster_wait();
    value = room.ctas[lane % CTAS];
    combine_lanes<CTAS>(value);
  }
  return value;
}
