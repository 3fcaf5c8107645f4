// The few vector operations that the kernels share, for AVX-512, AVX2 and any other machine.
//
// The types are GCC's and Clang's vector extensions, so +, *, &, << and comparisons (0 or -1 per lane) are the
// language's own; only what it lacks is spelled here. -DDETKERN_PORTABLE leaves the intrinsics out: the tests hold it
// to the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(DETKERN_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define DETKERN_AVX512 1
#include <immintrin.h>
#elif !defined(DETKERN_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DETKERN_AVX2 1
#include <immintrin.h>
#endif

#include "floats.h"

namespace detkern {

#if defined(DETKERN_AVX512)
constexpr int LANES = 16;
constexpr char INSTRUCTION_SET[] = "avx512";
#elif defined(DETKERN_AVX2)
constexpr int LANES = 8;
constexpr char INSTRUCTION_SET[] = "avx2";
#else
constexpr int LANES = 8;
constexpr char INSTRUCTION_SET[] = "portable";
#endif

typedef float Float __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef int16_t Short __attribute__((vector_size(4 * LANES)));  // twice as many lanes
typedef double Double __attribute__((vector_size(4 * LANES)));  // half as many

inline Float load_vector(const float* aligned) { return *reinterpret_cast<const Float*>(aligned); }
inline void store_vector(float* aligned, Float value) { *reinterpret_cast<Float*>(aligned) = value; }
inline Float as_float(Int value) { return reinterpret_cast<Float>(value); }
inline Int as_int(Float value) { return reinterpret_cast<Int>(value); }
inline Float splat(float value) { return value - Float{}; }
inline Int splat_int(int32_t value) { return value - Int{}; }
inline Short splat_short(int16_t value) { return value - Short{}; }
inline Float select(Int mask, Float yes, Float no) { return as_float((mask & as_int(yes)) | (~mask & as_int(no))); }
inline Float canonical(Float value) { return select(value == value, value, as_float(splat_int(int32_t(NAN_F32)))); }

#if defined(DETKERN_AVX512)

inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
inline Int truncate(Float value) { return reinterpret_cast<Int>(_mm512_cvttps_epi32(value)); }
inline Int magnitude(Int value) { return reinterpret_cast<Int>(_mm512_abs_epi32(reinterpret_cast<__m512i>(value))); }
inline Short maximum(Short a, Short b) {
  return reinterpret_cast<Short>(_mm512_max_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline Short narrow(Int low, Int high) {
  return reinterpret_cast<Short>(
      _mm512_packs_epi32(reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high)));
}
inline Int widen_low(Short value) {
  const __m512i v = reinterpret_cast<__m512i>(value);
  return reinterpret_cast<Int>(_mm512_srai_epi32(_mm512_unpacklo_epi16(v, v), 16));
}
inline Int widen_high(Short value) {
  const __m512i v = reinterpret_cast<__m512i>(value);
  return reinterpret_cast<Int>(_mm512_srai_epi32(_mm512_unpackhi_epi16(v, v), 16));
}
inline bool any(Int mask) {
  const __m512i v = reinterpret_cast<__m512i>(mask);
  return _mm512_test_epi32_mask(v, v) != 0;
}
inline Double low_half(Float value) { return _mm512_cvtps_pd(_mm512_castps512_ps256(value)); }
inline Double high_half(Float value) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1)); }
inline Double truncate(Double value) {
  return _mm512_roundscale_pd(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
inline Float round_to_f16(Float value) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_f16(char* address, Float value) {
  const __m256i halves = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), halves);
}
inline Float load_f16(const char* address) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
}

#elif defined(DETKERN_AVX2)

inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
inline Int truncate(Float value) { return reinterpret_cast<Int>(_mm256_cvttps_epi32(value)); }
inline Int magnitude(Int value) { return reinterpret_cast<Int>(_mm256_abs_epi32(reinterpret_cast<__m256i>(value))); }
inline Short maximum(Short a, Short b) {
  return reinterpret_cast<Short>(_mm256_max_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Short narrow(Int low, Int high) {
  return reinterpret_cast<Short>(
      _mm256_packs_epi32(reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high)));
}
inline Int widen_low(Short value) {
  const __m256i v = reinterpret_cast<__m256i>(value);
  return reinterpret_cast<Int>(_mm256_srai_epi32(_mm256_unpacklo_epi16(v, v), 16));
}
inline Int widen_high(Short value) {
  const __m256i v = reinterpret_cast<__m256i>(value);
  return reinterpret_cast<Int>(_mm256_srai_epi32(_mm256_unpackhi_epi16(v, v), 16));
}
inline bool any(Int mask) {
  const __m256i v = reinterpret_cast<__m256i>(mask);
  return !_mm256_testz_si256(v, v);
}
inline Double low_half(Float value) { return _mm256_cvtps_pd(_mm256_castps256_ps128(value)); }
inline Double high_half(Float value) { return _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1)); }
inline Double truncate(Double value) { return _mm256_round_pd(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline Float round_to_f16(Float value) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_f16(char* address, Float value) {
  const __m128i halves = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(address), halves);
}
inline Float load_f16(const char* address) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
}

#else

inline Float fma(Float a, Float b, Float c) {
  Float result;
  for (int i = 0; i < LANES; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
}
inline Int truncate(Float value) { return __builtin_convertvector(value, Int); }
inline Int magnitude(Int value) { return (value ^ (value >> 31)) - (value >> 31); }
inline Short maximum(Short a, Short b) {
  const Short mask = a > b;
  return (a & mask) | (b & ~mask);
}
inline Short narrow(Int low, Int high) {
  Short result;
  for (int i = 0; i < LANES; ++i) {
    result[i] = int16_t(low[i]);
    result[LANES + i] = int16_t(high[i]);
  }
  return result;
}
inline Int widen_low(Short value) {
  Int result;
  for (int i = 0; i < LANES; ++i) result[i] = value[i];
  return result;
}
inline Int widen_high(Short value) {
  Int result;
  for (int i = 0; i < LANES; ++i) result[i] = value[LANES + i];
  return result;
}
inline bool any(Int mask) {
  int32_t all = 0;
  for (int i = 0; i < LANES; ++i) all |= mask[i];
  return all != 0;
}
inline Double low_half(Float value) {
  Double result;
  for (int i = 0; i < LANES / 2; ++i) result[i] = value[i];
  return result;
}
inline Double high_half(Float value) {
  Double result;
  for (int i = 0; i < LANES / 2; ++i) result[i] = value[LANES / 2 + i];
  return result;
}
inline Double truncate(Double value) {
  for (int i = 0; i < LANES / 2; ++i) value[i] = __builtin_trunc(value[i]);
  return value;
}
inline Float round_to_f16(Float value) {
  for (int i = 0; i < LANES; ++i) value[i] = f16_to_f32(f32_to_f16(value[i]));
  return value;
}
inline void store_f16(char* address, Float value) {
  for (int i = 0; i < LANES; ++i) store<DETKERN_F16>(address + 2 * i, value[i]);
}
inline Float load_f16(const char* address) {
  Float result;
  for (int i = 0; i < LANES; ++i) result[i] = f16_to_f32(load_raw<uint16_t>(address + 2 * i));
  return result;
}

#endif

// Where `narrow` puts column c of two vectors: x86 packs within each 128 bits.
constexpr int narrow_position(int column) {
#if defined(DETKERN_AVX512) || defined(DETKERN_AVX2)
  const int vector = column / LANES, lane = column % LANES;
  return lane / 4 * 8 + vector * 4 + lane % 4;
#else
  return column;
#endif
}

inline bool any(Short mask) { return any(reinterpret_cast<Int>(mask)); }
inline Float to_float(Int value) { return __builtin_convertvector(value, Float); }

// LANES adjacent elements of a type of 16 bits or more, exactly in binary32.
template <int DTYPE>
inline Float load_lanes(const char* address) {
  Float value;
  if constexpr (DTYPE == DETKERN_F32) std::memcpy(&value, address, sizeof value);
  if constexpr (DTYPE == DETKERN_F16) value = load_f16(address);
  if constexpr (DTYPE == DETKERN_BF16) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
    Halves halves;
    std::memcpy(&halves, address, sizeof halves);
    value = as_float(__builtin_convertvector(halves, Int) << 16);
  }
  return value;
}

// A NaN stays some NaN; a magnitude beyond the largest finite number becomes infinity.
inline Float round_to_bf16(Float value) {
  const Int bits = as_int(value);
  const Int rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff;
  return select(value == value, as_float(rounded), value);
}

// LANES adjacent elements, in which a NaN is canonical in binary32 already.
template <int DTYPE>
inline void store_lanes(char* address, Float value) {
  if constexpr (DTYPE == DETKERN_F32) std::memcpy(address, &value, sizeof value);
  if constexpr (DTYPE == DETKERN_F16) store_f16(address, value);
  if constexpr (DTYPE == DETKERN_BF16) {
    typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
    const Halves halves = __builtin_convertvector(as_int(round_to_bf16(value)) >> 16, Halves);
    std::memcpy(address, &halves, sizeof halves);
  }
}

}  // namespace detkern
