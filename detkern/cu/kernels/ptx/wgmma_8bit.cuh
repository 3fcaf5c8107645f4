// The instruction wgmma.mma_async m64nNk32 of 8-bit floating-point operands (PTX ISA 8.x, 9.7.15.5.2), sm_90a.
#pragma once

#include "ptx/wgmma.cuh"

#define DETKERN_WGMMA_8BIT(N, TYPE_A, TYPE_B, A, B, SCALE)                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE_A "." TYPE_B " {" DETKERN_D_##N "}, %" #A        \
               ", %" #B ", %" #SCALE ", 1, 1;"                                                                         \
               : DETKERN_OUT_##N                                                                                       \
               : "l"(a), "l"(b), "n"(FROM_ZERO ? 0 : 1))
#define DETKERN_WIDTH_8BIT(N, A, B, SCALE)                                                                             \
  if constexpr (WIDTH == N) {                                                                                          \
    if constexpr (DTYPE_A == E4M3 && DTYPE_B == E4M3) DETKERN_WGMMA_8BIT(N, "e4m3", "e4m3", A, B, SCALE);              \
    if constexpr (DTYPE_A == E4M3 && DTYPE_B == E5M2) DETKERN_WGMMA_8BIT(N, "e4m3", "e5m2", A, B, SCALE);              \
    if constexpr (DTYPE_A == E5M2 && DTYPE_B == E4M3) DETKERN_WGMMA_8BIT(N, "e5m2", "e4m3", A, B, SCALE);              \
    if constexpr (DTYPE_A == E5M2 && DTYPE_B == E5M2) DETKERN_WGMMA_8BIT(N, "e5m2", "e5m2", A, B, SCALE);              \
  }

// As Wgmma16, in steps of 32 k. Both operands are K_MAJOR.
template <int DTYPE_A, int DTYPE_B>
struct Wgmma8 {
  static constexpr int STEP_K = 32;
  static_assert((DTYPE_A == E4M3 || DTYPE_A == E5M2) && (DTYPE_B == E4M3 || DTYPE_B == E5M2), "8-bit floating point");

  template <int WIDTH, bool FROM_ZERO, int TRANSPOSED_A, int TRANSPOSED_B>
  static DETKERN_INLINE void multiply(float (&d)[WIDTH / 2], uint64_t a, uint64_t b) {
    static_assert(TRANSPOSED_A == 0 && TRANSPOSED_B == 0, "no transposition of 8-bit operands");
    static_assert(WIDTH % 8 == 0 && WIDTH <= 256, "a width of wgmma");
    DETKERN_WIDTH_8BIT(8, 4, 5, 6)
    DETKERN_WIDTH_8BIT(16, 8, 9, 10)
    DETKERN_WIDTH_8BIT(24, 12, 13, 14)
    DETKERN_WIDTH_8BIT(32, 16, 17, 18)
    DETKERN_WIDTH_8BIT(40, 20, 21, 22)
    DETKERN_WIDTH_8BIT(48, 24, 25, 26)
    DETKERN_WIDTH_8BIT(56, 28, 29, 30)
    DETKERN_WIDTH_8BIT(64, 32, 33, 34)
    DETKERN_WIDTH_8BIT(72, 36, 37, 38)
    DETKERN_WIDTH_8BIT(80, 40, 41, 42)
    DETKERN_WIDTH_8BIT(88, 44, 45, 46)
    DETKERN_WIDTH_8BIT(96, 48, 49, 50)
    DETKERN_WIDTH_8BIT(104, 52, 53, 54)
    DETKERN_WIDTH_8BIT(112, 56, 57, 58)
    DETKERN_WIDTH_8BIT(120, 60, 61, 62)
    DETKERN_WIDTH_8BIT(128, 64, 65, 66)
    DETKERN_WIDTH_8BIT(136, 68, 69, 70)
    DETKERN_WIDTH_8BIT(144, 72, 73, 74)
    DETKERN_WIDTH_8BIT(152, 76, 77, 78)
    DETKERN_WIDTH_8BIT(160, 80, 81, 82)
    DETKERN_WIDTH_8BIT(168, 84, 85, 86)
    DETKERN_WIDTH_8BIT(176, 88, 89, 90)
    DETKERN_WIDTH_8BIT(184, 92, 93, 94)
    DETKERN_WIDTH_8BIT(192, 96, 97, 98)
    DETKERN_WIDTH_8BIT(200, 100, 101, 102)
    DETKERN_WIDTH_8BIT(208, 104, 105, 106)
    DETKERN_WIDTH_8BIT(216, 108, 109, 110)
    DETKERN_WIDTH_8BIT(224, 112, 113, 114)
    DETKERN_WIDTH_8BIT(232, 116, 117, 118)
    DETKERN_WIDTH_8BIT(240, 120, 121, 122)
    DETKERN_WIDTH_8BIT(248, 124, 125, 126)
    DETKERN_WIDTH_8BIT(256, 128, 129, 130)
  }
};
