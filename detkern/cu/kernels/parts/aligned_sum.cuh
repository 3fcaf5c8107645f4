// What an aligned sum (docs/contracts.md) ends with.
#pragma once

#include "parts/team.cuh"

constexpr int FRACTION_BITS = 43;  // of a sum's largest term

// 2^exponent, a normal number.
DETKERN_INLINE float power(int exponent) { return __int_as_float((exponent + 127) << 23); }

// total * 2^(exponent - FRACTION_BITS), rounded once: what is below 2^-126 is a multiple of 2^-149 and has no more than
// 23 bits.
DETKERN_INLINE float rounded(const Sum& total, int exponent) {
  return __fmul_rn(__fmul_rn(__ll2float_rn(total.value), power(-FRACTION_BITS)), power(exponent));
}

DETKERN_INLINE float rounded(const WideSum& total, int exponent) {
  const bool negative = total.high < 0;
  uint64_t high = negative ? ~static_cast<uint64_t>(total.high) + (total.low == 0) : total.high;
  uint64_t low = negative ? 0 - total.low : total.low;
  int shift = 0;
  if (high != 0) {
    shift = 64 - __clzll(high);
    const uint64_t kept = shift == 64 ? high : high << (64 - shift) | low >> shift;
    const bool left = shift == 64 ? low != 0 : low << (64 - shift) != 0;
    low = kept | left;  // far below the 24 bits that are kept
  }
  const float magnitude = __fmul_rn(__fmul_rn(__ull2float_rn(low), power(shift - FRACTION_BITS)), power(exponent));
  return negative ? -magnitude : magnitude;
}
