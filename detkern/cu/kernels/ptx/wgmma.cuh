// The instruction wgmma.mma_async m64nNk16 (PTX ISA 8.x, 9.7.15.5.2) of Hopper, sm_90a, for all widths N.
//
// Inline assembly takes its operands one by one, so the registers of the accumulator are written out here, and nowhere
// else: DETKERN_D_<N> are their N / 2 numbers in the text, DETKERN_OUT_<N> the operands.
#pragma once

#include "ptx/types.cuh"

#define DETKERN_D_8 "%0, %1, %2, %3"
#define DETKERN_D_16 DETKERN_D_8 ", %4, %5, %6, %7"
#define DETKERN_D_24 DETKERN_D_16 ", %8, %9, %10, %11"
#define DETKERN_D_32 DETKERN_D_24 ", %12, %13, %14, %15"
#define DETKERN_D_40 DETKERN_D_32 ", %16, %17, %18, %19"
#define DETKERN_D_48 DETKERN_D_40 ", %20, %21, %22, %23"
#define DETKERN_D_56 DETKERN_D_48 ", %24, %25, %26, %27"
#define DETKERN_D_64 DETKERN_D_56 ", %28, %29, %30, %31"
#define DETKERN_D_72 DETKERN_D_64 ", %32, %33, %34, %35"
#define DETKERN_D_80 DETKERN_D_72 ", %36, %37, %38, %39"
#define DETKERN_D_88 DETKERN_D_80 ", %40, %41, %42, %43"
#define DETKERN_D_96 DETKERN_D_88 ", %44, %45, %46, %47"
#define DETKERN_D_104 DETKERN_D_96 ", %48, %49, %50, %51"
#define DETKERN_D_112 DETKERN_D_104 ", %52, %53, %54, %55"
#define DETKERN_D_120 DETKERN_D_112 ", %56, %57, %58, %59"
#define DETKERN_D_128 DETKERN_D_120 ", %60, %61, %62, %63"
#define DETKERN_D_136 DETKERN_D_128 ", %64, %65, %66, %67"
#define DETKERN_D_144 DETKERN_D_136 ", %68, %69, %70, %71"
#define DETKERN_D_152 DETKERN_D_144 ", %72, %73, %74, %75"
#define DETKERN_D_160 DETKERN_D_152 ", %76, %77, %78, %79"
#define DETKERN_D_168 DETKERN_D_160 ", %80, %81, %82, %83"
#define DETKERN_D_176 DETKERN_D_168 ", %84, %85, %86, %87"
#define DETKERN_D_184 DETKERN_D_176 ", %88, %89, %90, %91"
#define DETKERN_D_192 DETKERN_D_184 ", %92, %93, %94, %95"
#define DETKERN_D_200 DETKERN_D_192 ", %96, %97, %98, %99"
#define DETKERN_D_208 DETKERN_D_200 ", %100, %101, %102, %103"
#define DETKERN_D_216 DETKERN_D_208 ", %104, %105, %106, %107"
#define DETKERN_D_224 DETKERN_D_216 ", %108, %109, %110, %111"
#define DETKERN_D_232 DETKERN_D_224 ", %112, %113, %114, %115"
#define DETKERN_D_240 DETKERN_D_232 ", %116, %117, %118, %119"
#define DETKERN_D_248 DETKERN_D_240 ", %120, %121, %122, %123"
#define DETKERN_D_256 DETKERN_D_248 ", %124, %125, %126, %127"

#define DETKERN_OUT_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define DETKERN_OUT_16 DETKERN_OUT_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define DETKERN_OUT_24 DETKERN_OUT_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define DETKERN_OUT_32 DETKERN_OUT_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define DETKERN_OUT_40 DETKERN_OUT_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define DETKERN_OUT_48 DETKERN_OUT_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define DETKERN_OUT_56 DETKERN_OUT_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define DETKERN_OUT_64 DETKERN_OUT_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define DETKERN_OUT_72 DETKERN_OUT_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define DETKERN_OUT_80 DETKERN_OUT_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define DETKERN_OUT_88 DETKERN_OUT_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define DETKERN_OUT_96 DETKERN_OUT_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define DETKERN_OUT_104 DETKERN_OUT_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define DETKERN_OUT_112 DETKERN_OUT_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define DETKERN_OUT_120 DETKERN_OUT_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define DETKERN_OUT_128 DETKERN_OUT_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define DETKERN_OUT_136 DETKERN_OUT_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define DETKERN_OUT_144 DETKERN_OUT_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define DETKERN_OUT_152 DETKERN_OUT_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define DETKERN_OUT_160 DETKERN_OUT_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define DETKERN_OUT_168 DETKERN_OUT_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define DETKERN_OUT_176 DETKERN_OUT_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define DETKERN_OUT_184 DETKERN_OUT_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define DETKERN_OUT_192 DETKERN_OUT_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define DETKERN_OUT_200 DETKERN_OUT_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define DETKERN_OUT_208 DETKERN_OUT_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define DETKERN_OUT_216 DETKERN_OUT_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define DETKERN_OUT_224 DETKERN_OUT_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define DETKERN_OUT_232 DETKERN_OUT_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define DETKERN_OUT_240 DETKERN_OUT_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define DETKERN_OUT_248 DETKERN_OUT_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define DETKERN_OUT_256 DETKERN_OUT_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// A and B by descriptors; the numbers are those of the operands after the accumulator.
#define DETKERN_WGMMA_SHARED(N, TYPE, A, B, SCALE, TRANS_A, TRANS_B)                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DETKERN_D_##N "}, %" #A ", %" #B  \
               ", %" #SCALE ", 1, 1, %" #TRANS_A ", %" #TRANS_B ";"                                                   \
               : DETKERN_OUT_##N                                                                                      \
               : "l"(a), "l"(b), "n"(FROM_ZERO ? 0 : 1), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B))
#define DETKERN_WIDTH(N, A, B, SCALE, TRANS_A, TRANS_B)                                                               \
  if constexpr (WIDTH == N && DTYPE == BF16) DETKERN_WGMMA_SHARED(N, "bf16", A, B, SCALE, TRANS_A, TRANS_B);          \
  if constexpr (WIDTH == N && DTYPE == F16) DETKERN_WGMMA_SHARED(N, "f16", A, B, SCALE, TRANS_A, TRANS_B);

// acc = A B (FROM_ZERO) or acc += A B on a 64 x WIDTH tile, one step of 16 k; a and b are descriptors. A warp has 16
// rows, in fragments [WIDTH / 8][4] as mma.m16n8k16's. Complete only after wgmma_wait.
template <int WIDTH, int DTYPE, bool FROM_ZERO, int TRANSPOSED_A, int TRANSPOSED_B>
DETKERN_INLINE void wgmma(float (&d)[WIDTH / 2], uint64_t a, uint64_t b) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "wgmma m64nNk16 is used for f16 and bf16");
  static_assert(WIDTH % 8 == 0 && WIDTH <= 256, "a width of wgmma");
  DETKERN_WIDTH(8, 4, 5, 6, 7, 8)
  DETKERN_WIDTH(16, 8, 9, 10, 11, 12)
  DETKERN_WIDTH(24, 12, 13, 14, 15, 16)
  DETKERN_WIDTH(32, 16, 17, 18, 19, 20)
  DETKERN_WIDTH(40, 20, 21, 22, 23, 24)
  DETKERN_WIDTH(48, 24, 25, 26, 27, 28)
  DETKERN_WIDTH(56, 28, 29, 30, 31, 32)
  DETKERN_WIDTH(64, 32, 33, 34, 35, 36)
  DETKERN_WIDTH(72, 36, 37, 38, 39, 40)
  DETKERN_WIDTH(80, 40, 41, 42, 43, 44)
  DETKERN_WIDTH(88, 44, 45, 46, 47, 48)
  DETKERN_WIDTH(96, 48, 49, 50, 51, 52)
  DETKERN_WIDTH(104, 52, 53, 54, 55, 56)
  DETKERN_WIDTH(112, 56, 57, 58, 59, 60)
  DETKERN_WIDTH(120, 60, 61, 62, 63, 64)
  DETKERN_WIDTH(128, 64, 65, 66, 67, 68)
  DETKERN_WIDTH(136, 68, 69, 70, 71, 72)
  DETKERN_WIDTH(144, 72, 73, 74, 75, 76)
  DETKERN_WIDTH(152, 76, 77, 78, 79, 80)
  DETKERN_WIDTH(160, 80, 81, 82, 83, 84)
  DETKERN_WIDTH(168, 84, 85, 86, 87, 88)
  DETKERN_WIDTH(176, 88, 89, 90, 91, 92)
  DETKERN_WIDTH(184, 92, 93, 94, 95, 96)
  DETKERN_WIDTH(192, 96, 97, 98, 99, 100)
  DETKERN_WIDTH(200, 100, 101, 102, 103, 104)
  DETKERN_WIDTH(208, 104, 105, 106, 107, 108)
  DETKERN_WIDTH(216, 108, 109, 110, 111, 112)
  DETKERN_WIDTH(224, 112, 113, 114, 115, 116)
  DETKERN_WIDTH(232, 116, 117, 118, 119, 120)
  DETKERN_WIDTH(240, 120, 121, 122, 123, 124)
  DETKERN_WIDTH(248, 124, 125, 126, 127, 128)
  DETKERN_WIDTH(256, 128, 129, 130, 131, 132)
}

// Orders this warp group's accesses to registers before its next wgmma (9.7.15.7.1).
DETKERN_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DETKERN_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the warp group's latest groups are in flight; what earlier ones wrote is complete
// then.
template <int PENDING>
DETKERN_INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The products of 16-bit operands, as a main loop takes them.
template <int DTYPE>
struct Wgmma16 {
  static constexpr int STEP_K = 16;

  template <int WIDTH, bool FROM_ZERO, int TRANSPOSED_A, int TRANSPOSED_B>
  static DETKERN_INLINE void multiply(float (&d)[WIDTH / 2], uint64_t a, uint64_t b) {
    wgmma<WIDTH, DTYPE, FROM_ZERO, TRANSPOSED_A, TRANSPOSED_B>(d, a, b);
  }
};
