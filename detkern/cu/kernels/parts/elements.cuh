// Elements of any of the three types, one or a piece at a time.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"

DETKERN_INLINE int clamp(int64_t value, int high) {
  return value < 0 ? 0 : value > high ? high : static_cast<int>(value);
}

DETKERN_INLINE int64_t quotient(int64_t dividend, int64_t divisor) {
  if (((dividend | divisor) >> 32) == 0) return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
  return dividend / divisor;
}

// The number whose bits they are.
template <int DTYPE>
DETKERN_INLINE float widened(uint32_t bits) {
  if constexpr (DTYPE == F32) {
    return __uint_as_float(bits);
  } else {
    return upcast<DTYPE>(bits);
  }
}

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

// A whole piece where it is wanted: sixteen bytes, or one element.
template <class Element, int COUNT>
DETKERN_INLINE void load_piece(bool wanted, const Element* source, uint32_t (&words)[COUNT]) {
  if constexpr (COUNT == 4) {
    load_global_if(wanted, source, words);
  } else {
    if (wanted) words[0] = *source;
  }
}
