// Warp-group matrix products of Hopper (wgmma, sm_90a): operand tiles in shared memory as its descriptors know them, and the
// instruction with A in registers. Section numbers are those of the PTX ISA 8.x.
//
// A descriptor's operand is made of swizzle atoms of eight rows: rows along k (K_MAJOR) are as wide as the tile's 32 or 64 k,
// 64 or 128 bytes; rows along m or n (MN_MAJOR) hold 64 of these, 128 bytes, and atoms follow one another along k first. In
// an atom the 16-byte chunks of a row are permuted by XOR with address bits 7 and up.
#pragma once

#include "mma_tile.cuh"

// K_MAJOR: the layout of mma_tile.cuh, whose permutation is the descriptors' 64-byte or 128-byte swizzle.
template <int LOAD, int EXTENT_MN, int EXTENT_K>
struct AtomLayout : TileLayout<LOAD, EXTENT_MN, EXTENT_K> {
  static_assert(LOAD == K_MAJOR && (EXTENT_K == 32 || EXTENT_K == 64), "a row must be one swizzle atom wide");
  static constexpr int TRANSPOSED = 0;

  // The descriptor (9.7.15.5.1.2) of 64 rows of m or n by 16 k, without its address: stride between atoms, swizzle mode.
  static constexpr uint32_t DESCRIPTOR_HIGH =
      (8 * TileLayout<LOAD, EXTENT_MN, EXTENT_K>::ROW_BYTES >> 4) | (EXTENT_K == 64 ? 1u : 2u) << 30;

  // The offset in bytes of the 64 rows and 16 k with these numbers.
  static constexpr DETKERN_INLINE uint32_t block(int mn, int k) {
    return mn * 64 * TileLayout<LOAD, EXTENT_MN, EXTENT_K>::ROW_BYTES + k * 32;
  }
};

template <int EXTENT_MN, int EXTENT_K>
struct AtomLayout<MN_MAJOR, EXTENT_MN, EXTENT_K> {
  static constexpr bool MN_ROWS = true;
  static constexpr int ROW_BYTES = 128;
  static constexpr int BYTES = EXTENT_MN * EXTENT_K * 2;
  static constexpr int TRANSPOSED = 1;
  static constexpr uint32_t DESCRIPTOR_HIGH = (8 * ROW_BYTES >> 4) | 1u << 30;
  static_assert(EXTENT_MN % 64 == 0 && EXTENT_K % 16 == 0, "a tile must be whole atoms, an even number along k");

  static constexpr DETKERN_INLINE uint32_t block(int mn, int k) { return (mn * EXTENT_K + k * 16) * ROW_BYTES; }

  DETKERN_INLINE uint32_t operator()(int row, int chunk) const {
    return (chunk / 8 * EXTENT_K + row) * ROW_BYTES + ((chunk % 8 ^ (row & 7)) << 4);
  }
};

// The descriptor of a block at a shared-memory address.
template <class Layout>
DETKERN_INLINE uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>(Layout::DESCRIPTOR_HIGH) << 32 | ((address & 0x3ffff) >> 4);
}

// Orders this warp group's accesses to registers before its next wgmma (9.7.15.7.1).
DETKERN_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DETKERN_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the warp group's latest groups are in flight; `acc`, written by an earlier one, is complete
// then. It is named so that no compiler reads it before.
template <int PENDING>
DETKERN_INLINE void wgmma_wait(float (&acc)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
                   "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
                   "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
                   "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
                   "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
                   "+f"(acc[31])
               : "n"(PENDING)
               : "memory");
}

// acc = A B (FROM_ZERO) or acc += A B on a 64 x 64 tile, one step of 16 k. A is a fragment as mma.m16n8k16 has it, 16 rows a
// warp; acc [8 columns, row half, column pair] likewise. Complete only after wgmma_wait.
template <int DTYPE, class LayoutB, bool FROM_ZERO>
DETKERN_INLINE void wgmma_m64n64k16(float (&acc)[32], const uint32_t (&a)[4], uint64_t b) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "wgmma m64n64k16 is used for f16 and bf16");
  if constexpr (DTYPE == BF16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, %37, 1, 1, %38;"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
                   "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
                   "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
                   "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
                   "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
                   "+f"(acc[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FROM_ZERO ? 0 : 1), "n"(LayoutB::TRANSPOSED));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, %37, 1, 1, %38;"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
                   "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
                   "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
                   "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
                   "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
                   "+f"(acc[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FROM_ZERO ? 0 : 1), "n"(LayoutB::TRANSPOSED));
  }
}
