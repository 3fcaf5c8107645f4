// One binary32 fused multiply-add in integers, for bfloat16 factors: what the vector unit's multiply-then-add is not
// where the product is inexact in binary32 (below 2^-134, or 2^128 and above).
#pragma once

#include <cstdint>

namespace detkern {

constexpr uint32_t INFINITY_BITS = 0x7f800000u, NAN_BITS = 0x7fffffffu, SIGN_BIT = 0x80000000u;

__aicore__ inline int32_t BitLength(uint64_t value) {
  int32_t length = 0;
  for (int32_t step = 32; step > 0; step /= 2) {
    if (value >> step) {
      value >>= step;
      length += step;
    }
  }
  return length + (value ? 1 : 0);
}

// value * 2^(from - to), bits below the last place gathered in it. Their place never decides a rounding: what is added
// to them is at least 2^36 times as large.
__aicore__ inline uint64_t Aligned(uint64_t value, int32_t from, int32_t to) {
  if (from >= to) return value << (from - to);
  const int32_t shift = to - from;
  if (shift > 63) return value ? 1 : 0;
  return value >> shift | ((value & ((uint64_t(1) << shift) - 1)) ? 1 : 0);
}

// a * b + c, rounded once to nearest even; a and b are upcast bfloat16 numbers. A NaN is 0x7fffffff.
__aicore__ inline uint32_t ExactFma(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t a_size = a & ~SIGN_BIT, b_size = b & ~SIGN_BIT, c_size = c & ~SIGN_BIT;
  const uint32_t product_sign = (a ^ b) & SIGN_BIT, c_sign = c & SIGN_BIT;
  if (a_size > INFINITY_BITS || b_size > INFINITY_BITS || c_size > INFINITY_BITS) return NAN_BITS;
  if (a_size == INFINITY_BITS || b_size == INFINITY_BITS) {
    if (a_size == 0 || b_size == 0) return NAN_BITS;
    if (c_size == INFINITY_BITS && c_sign != product_sign) return NAN_BITS;
    return product_sign | INFINITY_BITS;
  }
  if (c_size == INFINITY_BITS) return c;
  if (a_size == 0 || b_size == 0) return c_size ? c : (product_sign & c_sign);

  const int32_t a_field = int32_t(a_size >> 23), b_field = int32_t(b_size >> 23), c_field = int32_t(c_size >> 23);
  const uint64_t a_digits = (a_size >> 16 & 0x7f) | (a_field ? 0x80 : 0);
  const uint64_t b_digits = (b_size >> 16 & 0x7f) | (b_field ? 0x80 : 0);
  const uint64_t product = a_digits * b_digits;
  const int32_t product_last = (a_field ? a_field : 1) + (b_field ? b_field : 1) - 2 * 134;  // its last place
  const uint64_t c_digits = (c_size & 0x7fffff) | (c_field ? 0x800000 : 0);
  const int32_t c_last = (c_field ? c_field : 1) - 150;

  // Both in units of 2^last, where the larger has 61 bits.
  const int32_t product_top = product_last + BitLength(product), c_top = c_last + BitLength(c_digits);
  const int32_t last = (c_digits && c_top > product_top ? c_top : product_top) - 61;
  const uint64_t x = Aligned(product, product_last, last), y = c_digits ? Aligned(c_digits, c_last, last) : 0;
  const bool opposed = c_digits && product_sign != c_sign;
  const uint64_t sum = !opposed ? x + y : x > y ? x - y : y - x;
  if (sum == 0) return 0;
  const uint32_t sign = opposed && y > x ? c_sign : product_sign;

  const int32_t top = last + BitLength(sum) - 1;  // the exponent of its first digit
  const int32_t place = top < -126 ? -149 : top - 23;
  uint64_t digits = sum;
  if (place <= last) {
    digits = sum << (last - place);
  } else if (place - last > 63) {
    digits = 0;
  } else {
    const int32_t drop = place - last;
    const uint64_t rest = sum & ((uint64_t(1) << drop) - 1), half = uint64_t(1) << (drop - 1);
    digits = sum >> drop;
    if (rest > half || (rest == half && (digits & 1))) ++digits;
  }
  // A carry out of the digits is the next exponent.
  const uint32_t size = top < -126 ? uint32_t(digits) : (uint32_t(top + 126) << 23) + uint32_t(digits);
  return sign | (top > 127 || size > INFINITY_BITS ? INFINITY_BITS : size);
}

}  // namespace detkern
