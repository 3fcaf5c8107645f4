// The tensor-core step: acc = step(acc, GROUP products), the arithmetic of mma16, mma8, tree-mma16 and fp8-block128.
//
//   1. The exponent of a normal operand is its own, of a subnormal one that of the type's smallest normal number; a
//      product's is the plain sum.
//   2. E = max(FLOOR, exponents of the non-zero terms, the accumulator among them).
//   3. Each term is truncated toward zero to a multiple of 2^(E - FRACTION_BITS); the terms are summed exactly.
//   4. The sum is truncated toward zero to SIGNIFICANT_BITS, below 2^-126 to a multiple of 2^-149; 2^128 or more is
//      infinity.
//   5. A zero is +0. NaN and infinities decide as in any sum of products.
//
// exact_step is that definition in integers. The vector form takes products, exact in binary32, times 2^(FRACTION_BITS
// - E), truncates them to 32-bit integers and adds those; where its preconditions fail it leaves the lane to
// exact_step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "packing.h"
#include "simd.h"

namespace detkern {

template <int GROUP_, int FRACTION_BITS_, int FLOOR_, int SIGNIFICANT_BITS_>
struct StepRules {
  static constexpr int GROUP = GROUP_, FRACTION_BITS = FRACTION_BITS_, FLOOR = FLOOR_;
  static constexpr int SIGNIFICANT_BITS = SIGNIFICANT_BITS_;
};

using HopperStep = StepRules<16, 25, -133, 24>;
using AmpereStep = StepRules<8, 24, -132, 24>;
using HopperFp8Step = StepRules<32, 13, -133, 14>;

// value = significand * 2^(exponent - 23), its exponent at least `smallest`.
struct Parts {
  int64_t significand;
  int exponent;
  bool negative;
};

inline Parts parts_of(float value, int smallest) {
  const uint32_t bits = to_bits(value), field = (bits >> 23) & 255u;
  int64_t significand = bits & 0x7fffffu;
  if (field) significand |= 0x800000;
  int exponent = field ? int(field) - 127 : -126;
  if (exponent < smallest) {  // a subnormal of a narrower type: its bits end long before they could be shifted out
    significand >>= std::min(smallest - exponent, 63);
    exponent = smallest;
  }
  return {significand, exponent, (bits >> 31) != 0};
}

// magnitude * 2^scale truncated toward zero to the rules' bits.
template <class Rules>
inline float truncated(int64_t sum, int scale) {
  const bool negative = sum < 0;
  uint64_t magnitude = negative ? uint64_t(-sum) : uint64_t(sum);
  if (magnitude == 0) return 0.0f;
  const int length = 64 - __builtin_clzll(magnitude);
  int drop = std::max(length - Rules::SIGNIFICANT_BITS, 0);
  drop = std::max(drop, -149 - scale);
  if (drop >= length) return 0.0f;
  magnitude >>= drop;
  const int last_place = scale + drop, kept = length - drop;
  const uint32_t sign = negative ? 0x80000000u : 0u;
  if (last_place + kept - 1 >= 128) return from_bits(sign | 0x7f800000u);
  // At most 24 bits at a last place of at least 2^-149: every step below is exact.
  float value = float(magnitude);
  int remaining = last_place;
  for (; remaining > 100; remaining -= 100) value *= from_bits(227u << 23);
  for (; remaining < -100; remaining += 100) value *= from_bits(27u << 23);
  return from_bits(sign | to_bits(value * from_bits(uint32_t(127 + remaining) << 23)));
}

// a[k] and b[k * b_stride] for k < GROUP, upcast; `a_smallest` and `b_smallest` are smallest_exponent of their types.
template <class Rules>
float exact_step(const float* a, int a_smallest, const float* b, int b_stride, int b_smallest, float acc) {
  constexpr float INFINITE = __builtin_inff();
  bool invalid = acc != acc, positive = acc == INFINITE, negative = acc == -INFINITE;
  int largest = Rules::FLOOR;
  if (acc != 0) largest = std::max(largest, parts_of(acc, -126).exponent);
  for (int k = 0; k < Rules::GROUP; ++k) {
    const float x = a[k], y = b[k * b_stride];
    const bool infinite = x == INFINITE || x == -INFINITE || y == INFINITE || y == -INFINITE;
    if (x != x || y != y || (infinite && (x == 0 || y == 0))) {
      invalid = true;
    } else if (infinite) {
      ((x < 0) != (y < 0) ? negative : positive) = true;
    } else if (x != 0 && y != 0) {
      largest = std::max(largest, parts_of(x, a_smallest).exponent + parts_of(y, b_smallest).exponent);
    }
  }
  if (invalid || (positive && negative)) return from_bits(NAN_F32);
  if (positive) return INFINITE;
  if (negative) return -INFINITE;
  const int scale = largest - Rules::FRACTION_BITS;
  int64_t sum = 0;
  const auto add = [&sum, scale](int64_t magnitude, int last_place, bool minus) {
    const int shift = last_place - scale;
    magnitude = shift >= 0 ? magnitude << shift : magnitude >> std::min(-shift, 63);
    sum += minus ? -magnitude : magnitude;
  };
  if (acc != 0) {
    const Parts part = parts_of(acc, -126);
    add(part.significand, part.exponent - 23, part.negative);
  }
  for (int k = 0; k < Rules::GROUP; ++k) {
    const Parts x = parts_of(a[k], a_smallest), y = parts_of(b[k * b_stride], b_smallest);
    add(x.significand * y.significand, x.exponent + y.exponent - 46, x.negative != y.negative);
  }
  return truncated<Rules>(sum, scale);
}

// `groups` steps for R rows of a micro tile; acc[r * COLUMNS + c] is read and written.
template <class Rules, int R, int BLOCK_K>
inline void step_chain(const Panels<BLOCK_K, true>& block, int row, int panel, int first_k, int groups, int a_smallest,
                       int b_smallest, Float (&acc)[R][2]) {
  constexpr int PITCH = Panels<BLOCK_K, true>::PITCH, GROUP = Rules::GROUP, F = Rules::FRACTION_BITS;
  // The exponents E for which the vector form is exact: 2^(F - E) and 2^(E - F) are normal, no product of two operands
  // overflows, and what a product loses below 2^-134 is under the truncation.
  constexpr int LOWEST = F - 126, HIGHEST = 125;
  // Terms are below 2^(F + 2), the accumulator's below 2^(F + 1): only their sum may leave 31 bits.
  constexpr bool MAY_FILL = (int64_t(GROUP) << (F + 2)) + (int64_t(1) << (F + 1)) > INT32_MAX;
  static_assert((int64_t(GROUP) << (F + 2)) <= int64_t(INT32_MAX) + 1, "the products alone must fit 32 bits");
  static_assert(Rules::FLOOR <= LOWEST, "the floor is exact_step's alone");

  for (int group = 0; group < groups; ++group) {
    const int k0 = first_k + group * GROUP;
    const float* a = block.a + size_t(row) * PITCH + k0;
    const int32_t* a_exponents = block.a_exponents + size_t(row) * PITCH + k0;
    const float* b = block.panel(panel) + k0 * COLUMNS;
    const int16_t* b_exponents = block.exponent_panel(panel) + k0 * COLUMNS;

    Short exponent[R];
    for (int r = 0; r < R; ++r) {
      Int own[2];
      for (int v = 0; v < 2; ++v) {
        const Int bits = as_int(acc[r][v]) & 0x7fffffff;
        own[v] = (bits >> 23) - 127 + ((bits == 0) & EXPONENT_ZERO);
      }
      exponent[r] = narrow(own[0], own[1]);
    }
    for (int k = 0; k < GROUP; ++k) {
      const Short column_exponent = *reinterpret_cast<const Short*>(b_exponents + k * COLUMNS);
      for (int r = 0; r < R; ++r)
        exponent[r] =
            maximum(exponent[r], column_exponent + reinterpret_cast<Short>(splat_int(a_exponents[r * PITCH + k])));
    }

    Short outside[R], outside_any{};
    Float scale[R][2], unscale[R][2];
    for (int r = 0; r < R; ++r) {
      outside[r] = (exponent[r] > HIGHEST) | ((exponent[r] < LOWEST) & (exponent[r] > EXPONENT_NONE));
      outside_any |= outside[r];
      const Short clamped = maximum(exponent[r], splat_short(LOWEST));
      const Int wide[2] = {widen_low(clamped), widen_high(clamped)};
      for (int v = 0; v < 2; ++v) {
        scale[r][v] = as_float((F + 127 - wide[v]) << 23);
        unscale[r][v] = as_float((wide[v] - F + 127) << 23);
      }
    }

    Int sum[R][2] = {};
    for (int k = 0; k < GROUP; ++k) {
      const Float b0 = load_vector(b + k * COLUMNS), b1 = load_vector(b + k * COLUMNS + LANES);
      for (int r = 0; r < R; ++r) {
        const Float x = splat(a[r * PITCH + k]);
        sum[r][0] += truncate(x * b0 * scale[r][0]);
        sum[r][1] += truncate(x * b1 * scale[r][1]);
      }
    }

    Int full[R][2] = {}, full_any{};
    Float result[R][2];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) {
        if constexpr (MAY_FILL) {
          full[r][v] = magnitude(sum[r][v]) > INT32_MAX - (1 << (F + 1));
          full_any |= full[r][v];
        }
        const Int total = sum[r][v] + truncate(acc[r][v] * scale[r][v]);
        const Int size = magnitude(total);
        Int kept;
        if constexpr (Rules::SIGNIFICANT_BITS == 24) {
          // Clearing the bit below the 24th makes the conversion, to nearest, round down.
          kept = as_int(to_float(size & ~(size >> 24)));
        } else {
          static_assert((int64_t(GROUP) << (F + 2)) + (int64_t(1) << (F + 1)) <= 1 << 24, "exact as a float");
          kept = as_int(to_float(size)) & ~((1 << (24 - Rules::SIGNIFICANT_BITS)) - 1);
        }
        result[r][v] = as_float(as_int(as_float(kept) * unscale[r][v]) | (total & INT32_MIN));
      }

    if (__builtin_expect(any(outside_any) || (MAY_FILL && any(full_any)), 0)) {
      for (int r = 0; r < R; ++r) {
        const Int wide[2] = {widen_low(outside[r]) | full[r][0], widen_high(outside[r]) | full[r][1]};
        for (int c = 0; c < COLUMNS; ++c) {
          const int v = c / LANES, lane = c % LANES;
          if (!wide[v][lane]) continue;
          result[r][v][lane] =
              exact_step<Rules>(a + r * PITCH, a_smallest, b + c, COLUMNS, b_smallest, acc[r][v][lane]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) acc[r][v] = result[r][v];
  }
}

}  // namespace detkern
