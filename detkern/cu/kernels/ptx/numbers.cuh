// The 16-bit arithmetic of the contracts: exact to binary32, one rounding back. Section numbers are those of the PTX
// ISA 8.x.
#pragma once

#include "ptx/types.cuh"

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

// 1 / x of a normal number to one unit in the last place (9.7.3.12), from which a rounded one can be made.
DETKERN_INLINE float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
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
