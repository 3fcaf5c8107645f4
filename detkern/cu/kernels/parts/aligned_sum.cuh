// What an aligned sum (docs/contracts.md) ends with, and the numbers that row operations read and write.
#pragma once

#include "ptx/numbers.cuh"
#include "parts/team.cuh"

constexpr int FRACTION_BITS = 43;  // of a sum's largest term

DETKERN_INLINE int64_t quotient(int64_t dividend, int64_t divisor) {
  if (((dividend | divisor) >> 32) == 0) return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
  return dividend / divisor;
}

// 2^exponent, a normal number.
DETKERN_INLINE float power(int exponent) { return __int_as_float((exponent + 127) << 23); }

// One element of any type.
DETKERN_INLINE float load_any(const void* data, int64_t offset, int dtype) {
  if (dtype == F32) return static_cast<const float*>(data)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(data)[offset];
  return dtype == F16 ? upcast<F16>(bits) : upcast<BF16>(bits);
}

// + 0, which also makes a NaN canonical, and one rounding.
DETKERN_INLINE void store_any(void* data, int64_t offset, int dtype, float value) {
  value = __fadd_rn(value, 0.0f);
  if (dtype == F32) {
    static_cast<float*>(data)[offset] = value;
  } else {
    static_cast<uint16_t*>(data)[offset] = dtype == F16 ? round_one<F16>(value) : round_one<BF16>(value);
  }
}

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
