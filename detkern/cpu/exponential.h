// exp and log of docs/contracts.md ("The exponential and the logarithm"), for LANES numbers at once. Every operation is
// one binary32 operation of the contract, in its order.
#pragma once

#include "simd.h"

namespace detkern {

constexpr float LOG2_E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
constexpr float ROUNDER = 0x1.8p+23f;  // added to a small number, it leaves that number's integer in the low bits
constexpr float EXP_LOWEST = -104.0f, EXP_HIGHEST = 89.0f;
constexpr float EXP_COEFFICIENTS[] =
    {0x1.6a23f6p-10f, 0x1.123a0ap-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1.0f, 1.0f};
constexpr float LOG_COEFFICIENTS[] = {-0x1.0931e8p-3f, 0x1.1ed08ep-3f, -0x1.f25dd8p-4f, 0x1.1ebe90p-3f, -0x1.55a754p-3f,
                                      0x1.99d1f0p-3f,  -0x1.fffe84p-3f, 0x1.555502p-2f, -0x1p-1f};
constexpr int32_t LOG_FIRST = 0x3f2aaaab;  // 2/3

// coefficients[0] x^(COUNT - 1) + … + coefficients[COUNT - 1]
template <int COUNT>
inline Float horner(const float (&coefficients)[COUNT], Float x) {
  Float value = splat(coefficients[0]);
  for (int i = 1; i < COUNT; ++i) value = fma(value, x, splat(coefficients[i]));
  return value;
}

inline Float power_of_two(Int exponent) { return as_float((exponent + 127) << 23); }

inline Float exponential(Float x) {
  const Float high = splat(EXP_HIGHEST), low = splat(EXP_LOWEST), rounder = splat(ROUNDER);
  Float clamped = select(x > high, high, x);  // comparisons that a NaN fails
  clamped = select(clamped < low, low, clamped);
  const Float shifted = fma(clamped, splat(LOG2_E), rounder);
  const Float integer = shifted - rounder;
  Float r = fma(integer, splat(-LN2_HIGH), clamped);
  r = fma(integer, splat(-LN2_LOW), r);
  const Float mantissa = horner(EXP_COEFFICIENTS, r);
  const Int exponent = as_int(shifted) - as_int(rounder), half = exponent >> 1;
  return (mantissa * power_of_two(half)) * power_of_two(exponent - half);
}

// Of numbers from 1 to below infinity, and of NaN.
inline Float logarithm(Float s) {
  const Int exponent = (as_int(s) - LOG_FIRST) >> 23;
  const Float f = as_float(as_int(s) - (exponent << 23)) - splat(1.0f);
  Float value = fma(f * f, horner(LOG_COEFFICIENTS, f), f);
  const Float k = to_float(exponent);
  value = fma(k, splat(LN2_LOW), value);
  value = fma(k, splat(LN2_HIGH), value);
  return select(s == s, value, s);
}

}  // namespace detkern
