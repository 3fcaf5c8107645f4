// The element types: their bits, exact upcasts to binary32 and the one rounding, to nearest even, back.
//
// Every load and store goes through memcpy, so that a pointer may have any alignment.
#pragma once

#include <cstdint>
#include <cstring>

#include "../abi/abi.h"

namespace detkern {

constexpr uint32_t NAN_F32 = 0x7fffffffu;
constexpr uint16_t NAN_16 = 0x7fffu;

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class T>
inline T load_raw(const char* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

inline float canonical(float value) { return value == value ? value : from_bits(NAN_F32); }

inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  // A subnormal is an integer times 2^-24: the float product is exact.
  const uint32_t subnormal = to_bits(float(magnitude) * from_bits(103u << 23));
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return from_bits(sign | (magnitude < 0x0400u ? subnormal : magnitude < 0x7c00u ? normal : special));
}

inline float bf16_to_f32(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // 0.5 has a last place of 2^-24, that of f16's subnormals, so the addition is the rounding.
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - (126u << 23);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above
  half |= (bits >> 16) & 0x8000u;
  return uint16_t(magnitude > 0x7f800000u ? NAN_16 : half);
}

inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? NAN_16 : rounded);
}

inline float e5m2_to_f32(uint8_t bits) { return f16_to_f32(uint16_t(bits << 8)); }

inline float e4m3_to_f32(uint8_t bits) {
  const uint32_t sign = uint32_t(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return from_bits(sign | NAN_F32);
  if (magnitude < 8u) return from_bits(sign | to_bits(float(magnitude) * from_bits(118u << 23)));  // times 2^-9
  return from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

constexpr int itemsize(int dtype) { return dtype == DETKERN_F32 ? 4 : dtype <= DETKERN_BF16 ? 2 : 1; }

// The exponent of the smallest normal number, which is also that of every subnormal one in a tensor-core step.
constexpr int smallest_exponent(int dtype) {
  return dtype == DETKERN_BF16 || dtype == DETKERN_F32 ? -126 : dtype == DETKERN_E4M3 ? -6 : -14;
}

template <int DTYPE>
inline float load(const char* address) {
  if constexpr (DTYPE == DETKERN_F32) return load_raw<float>(address);
  if constexpr (DTYPE == DETKERN_F16) return f16_to_f32(load_raw<uint16_t>(address));
  if constexpr (DTYPE == DETKERN_BF16) return bf16_to_f32(load_raw<uint16_t>(address));
  if constexpr (DTYPE == DETKERN_E4M3) return e4m3_to_f32(load_raw<uint8_t>(address));
  if constexpr (DTYPE == DETKERN_E5M2) return e5m2_to_f32(load_raw<uint8_t>(address));
}

template <int DTYPE>
inline void store(char* address, float value) {
  if constexpr (DTYPE == DETKERN_F32) {
    std::memcpy(address, &value, 4);
  } else {
    const uint16_t bits = DTYPE == DETKERN_F16 ? f32_to_f16(value) : f32_to_bf16(value);
    std::memcpy(address, &bits, 2);
  }
}

// Calls body(std::integral_constant-like tag) for the run-time type code.
template <int VALUE>
struct Tag {
  static constexpr int value = VALUE;
};

template <class Body>
inline void with_dtype(int dtype, Body body) {
  switch (dtype) {
    case DETKERN_F32: return body(Tag<DETKERN_F32>());
    case DETKERN_F16: return body(Tag<DETKERN_F16>());
    case DETKERN_BF16: return body(Tag<DETKERN_BF16>());
    case DETKERN_E4M3: return body(Tag<DETKERN_E4M3>());
    case DETKERN_E5M2: return body(Tag<DETKERN_E5M2>());
  }
}

}  // namespace detkern
