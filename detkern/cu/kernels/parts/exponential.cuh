// exp and log of docs/contracts.md ("The exponential and the logarithm"). Every operation is one binary32 operation of
// the contract, in its order; what is left out where it cannot matter is said.
#pragma once

#include "ptx/types.cuh"

constexpr float LOG2_E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
constexpr float ROUNDER = 0x1.8p+23f;  // added to a small number, it leaves that number's integer in the low bits
constexpr float EXP_LOWEST = -104.0f, EXP_HIGHEST = 89.0f;
// Between these e^x is a normal number with at least one binade to spare.
constexpr float EXP_PLAIN_LOWEST = -86.0f, EXP_PLAIN_HIGHEST = 88.0f;

DETKERN_INLINE float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The mantissa of e^x, from 0.7 to 1.5, and the exponent of its power of two.
DETKERN_INLINE float exponential_parts(float x, int& exponent) {
  const float shifted = __fmaf_rn(x, LOG2_E, ROUNDER);
  const float integer = __fadd_rn(shifted, -ROUNDER);
  float r = __fmaf_rn(integer, -LN2_HIGH, x);
  r = __fmaf_rn(integer, -LN2_LOW, r);
  float value = 0x1.6a23f6p-10f;
  value = __fmaf_rn(value, r, 0x1.123a0ap-7f);
  value = __fmaf_rn(value, r, 0x1.5558f2p-5f);
  value = __fmaf_rn(value, r, 0x1.555492p-3f);
  value = __fmaf_rn(value, r, 0x1.fffffcp-2f);
  value = __fmaf_rn(value, r, 1.0f);
  value = __fmaf_rn(value, r, 1.0f);
  exponent = __float_as_int(shifted) - __float_as_int(ROUNDER);
  return value;
}

DETKERN_INLINE float exponential(float x) {
  int exponent;
  if (x >= EXP_PLAIN_LOWEST && x <= EXP_PLAIN_HIGHEST) {
    // Neither limit clamps, and both multiplications are exact: they add to the exponent.
    const float mantissa = exponential_parts(x, exponent);
    return __int_as_float(__float_as_int(mantissa) + (exponent << 23));
  }
  float clamped = x > EXP_HIGHEST ? EXP_HIGHEST : x;  // comparisons that a NaN fails
  clamped = clamped < EXP_LOWEST ? EXP_LOWEST : clamped;
  const float mantissa = exponential_parts(clamped, exponent);
  const int half = exponent >> 1;
  return __fmul_rn(__fmul_rn(mantissa, power_of_two(half)), power_of_two(exponent - half));
}

constexpr float EXP_SCALE = 0x1p+64f;

// EXP_SCALE * e^x for x of 0 and less, before the rounding to a subnormal number: times 1 / EXP_SCALE, rounded, it is
// `exponential`. The coefficients are scaled, which changes no rounding, so that the power of two may go down to
// 2^-150. A NaN counts as the lowest.
DETKERN_INLINE float scaled_exponential(float x) {
  const float clamped = fmaxf(x, EXP_LOWEST);
  const float shifted = __fmaf_rn(clamped, LOG2_E, ROUNDER);
  const float integer = __fadd_rn(shifted, -ROUNDER);
  float r = __fmaf_rn(integer, -LN2_HIGH, clamped);
  r = __fmaf_rn(integer, -LN2_LOW, r);
  float value = EXP_SCALE * 0x1.6a23f6p-10f;
  value = __fmaf_rn(value, r, EXP_SCALE * 0x1.123a0ap-7f);
  value = __fmaf_rn(value, r, EXP_SCALE * 0x1.5558f2p-5f);
  value = __fmaf_rn(value, r, EXP_SCALE * 0x1.555492p-3f);
  value = __fmaf_rn(value, r, EXP_SCALE * 0x1.fffffcp-2f);
  value = __fmaf_rn(value, r, EXP_SCALE);
  value = __fmaf_rn(value, r, EXP_SCALE);
  // The bits of ROUNDER vanish from the sum: its last nine are zeros.
  return __int_as_float(__float_as_int(value) + (__float_as_int(shifted) << 23));
}

// Of numbers from 1 to below infinity, and of NaN.
DETKERN_INLINE float logarithm(float s) {
  if (s != s) return s;
  const int exponent = (__float_as_int(s) - 0x3f2aaaab) >> 23;
  const float f = __fadd_rn(__int_as_float(__float_as_int(s) - (exponent << 23)), -1.0f);
  float value = -0x1.0931e8p-3f;
  value = __fmaf_rn(value, f, 0x1.1ed08ep-3f);
  value = __fmaf_rn(value, f, -0x1.f25dd8p-4f);
  value = __fmaf_rn(value, f, 0x1.1ebe90p-3f);
  value = __fmaf_rn(value, f, -0x1.55a754p-3f);
  value = __fmaf_rn(value, f, 0x1.99d1f0p-3f);
  value = __fmaf_rn(value, f, -0x1.fffe84p-3f);
  value = __fmaf_rn(value, f, 0x1.555502p-2f);
  value = __fmaf_rn(value, f, -0x1p-1f);
  value = __fmaf_rn(__fmul_rn(f, f), value, f);
  const float k = __int2float_rn(exponent);
  value = __fmaf_rn(k, LN2_LOW, value);
  return __fmaf_rn(k, LN2_HIGH, value);
}
