// Warp-group matrix products of Hopper (wgmma, sm_90a): operand tiles in shared memory as its descriptors know them,
// and the instruction. Section numbers are those of the PTX ISA 8.x.
//
// A descriptor's operand is made of swizzle atoms of eight rows: rows along k (K_MAJOR) are as wide as the tile's 32 or
// 64 k, 64 or 128 bytes; rows along m or n (MN_MAJOR) hold 64 of these, 128 bytes, and atoms follow one another along k
// first. In an atom the 16-byte chunks of a row are permuted by XOR with address bits 7 and up.
#pragma once

#include "mma_tile.cuh"

// K_MAJOR: the layout of mma_tile.cuh, whose permutation is the descriptors' 64-byte or 128-byte swizzle.
template <int LOAD, int EXTENT_MN, int EXTENT_K>
struct AtomLayout : TileLayout<LOAD, EXTENT_MN, EXTENT_K> {
  static_assert(LOAD == K_MAJOR && (EXTENT_K == 32 || EXTENT_K == 64), "a row must be one swizzle atom wide");
  static constexpr int TRANSPOSED = 0;

  // The descriptor (9.7.15.5.1.2) of 64 rows of m or n by 16 k, without its address: stride between atoms, swizzle
  // mode.
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

// Copies of an operand's tiles, one after another along k, by a warp group that does nothing else: as TileCopy's, but
// with everything that a thread needs kept in its registers, and no bounds where a tile is whole.
template <int LOAD, class Layout, int EXTENT_MN, int EXTENT_K, int THREAD_COUNT>
class SteadyCopy {
 public:
  static constexpr int CHUNK = 8;  // elements, 16 bytes
  static constexpr int ALONG = (LOAD == MN_MAJOR ? EXTENT_MN : EXTENT_K) / CHUNK;
  static constexpr int LINES = LOAD == MN_MAJOR ? EXTENT_K : EXTENT_MN;
  static constexpr int LINES_PER_PASS = THREAD_COUNT / ALONG;
  static constexpr int PASSES = LINES / LINES_PER_PASS;
  static_assert(LOAD == K_MAJOR || LOAD == MN_MAJOR, "lines must be contiguous");
  static_assert(THREAD_COUNT % ALONG == 0 && LINES % LINES_PER_PASS == 0, "passes must be whole lines");
  static_assert(2 * LINES_PER_PASS % 8 == 0, "two passes must be whole swizzle atoms");

  // As TileCopy; from k = 0 on. thread: in 0 .. THREAD_COUNT - 1.
  DETKERN_INLINE SteadyCopy(const uint16_t* origin, int64_t mn_stride, int64_t k_stride, int64_t mn0, int64_t mn_size,
                            uint32_t thread)
      : mn_left_(clamp(mn_size - mn0, EXTENT_MN)) {
    const int first = thread / ALONG, chunk = thread % ALONG;
    const int64_t line_stride = LOAD == MN_MAJOR ? k_stride : mn_stride;
    source_ = reinterpret_cast<const char*>(origin + mn0 * mn_stride + first * line_stride + chunk * CHUNK);
    pass_stride_ = 2 * LINES_PER_PASS * line_stride;
    even_ = Layout{}(first, chunk);
    odd_ = Layout{}(first + LINES_PER_PASS, chunk);
  }

  // Starts the copies of the next tile, `k_left` of whose k are inside the operand; the others become zeros. Rows
  // outside hold anything: so may the outputs that they give.
  DETKERN_INLINE void copy_next(uint32_t tile, int64_t k_left) {
    const char* source = source_;
    if (mn_left_ == EXTENT_MN && k_left >= EXTENT_K) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass, source += pass_stride_) copy_async_16(tile + place(pass), source);
    } else {
      const uint32_t thread = static_cast<uint32_t>(thread_index()) % THREAD_COUNT;
      const int first = thread / ALONG, chunk = thread % ALONG;
      const int k_inside = clamp(k_left, EXTENT_K);
      const int bytes = 2 * clamp((LOAD == MN_MAJOR ? mn_left_ : k_inside) - chunk * CHUNK, CHUNK);
#pragma unroll 1
      for (int pass = 0; pass < PASSES; ++pass, source += pass_stride_) {
        const int line = first + pass * LINES_PER_PASS;
        const uint32_t target = tile + Layout{}(line, chunk);
        if (LOAD == MN_MAJOR) {
          copy_async_16(target, source, line < k_inside ? bytes : 0);
        } else if (line < mn_left_) {
          copy_async_16(target, source, bytes);
        }
      }
    }
    // Along m or n the passes have walked the tile's k; along k a line goes on behind its chunks.
    source_ = LOAD == MN_MAJOR ? source : source_ + 2 * EXTENT_K;
  }

 private:
  DETKERN_INLINE uint32_t place(int pass) const {
    return (pass % 2 == 0 ? even_ : odd_) + pass / 2 * 2 * LINES_PER_PASS * Layout::ROW_BYTES;
  }

  const char* source_;  // of this thread's first chunk of the next tile
  int64_t pass_stride_;  // bytes
  uint32_t even_, odd_;  // where the chunks of the first two passes go
  int mn_left_;  // of the tile's EXTENT_MN, those inside the operand
};

// The descriptor of a block of the tile at shared-memory address 16 * tile16. All of shared memory is within the
// address's 14 bits.
template <class Layout>
DETKERN_INLINE uint64_t descriptor(uint32_t tile16, int mn, int k) {
  return static_cast<uint64_t>(Layout::DESCRIPTOR_HIGH) << 32 | (tile16 + Layout::block(mn, k) / 16);
}

// Orders this warp group's accesses to registers before its next wgmma (9.7.15.7.1).
DETKERN_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DETKERN_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the warp group's latest groups are in flight; `acc`, written by an earlier one, is
// complete then. It is named so that no compiler reads it before.
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

// acc = A B (FROM_ZERO) or acc += A B on a 64 x 64 tile, one step of 16 k; a and b are descriptors. A warp has 16 rows,
// in fragments [8 columns][4] as mma.m16n8k16's. Complete only after wgmma_wait.
template <int DTYPE, class LayoutA, class LayoutB, bool FROM_ZERO>
DETKERN_INLINE void wgmma_m64n64k16(float (&acc)[32], uint64_t a, uint64_t b) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "wgmma m64n64k16 is used for f16 and bf16");
  if constexpr (DTYPE == BF16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, %34, 1, 1, %35, %36;"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
                   "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
                   "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
                   "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
                   "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
                   "+f"(acc[31])
                 : "l"(a), "l"(b), "n"(FROM_ZERO ? 0 : 1), "n"(LayoutA::TRANSPOSED), "n"(LayoutB::TRANSPOSED));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, %34, 1, 1, %35, %36;"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
                   "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
                   "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
                   "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
                   "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
                   "+f"(acc[31])
                 : "l"(a), "l"(b), "n"(FROM_ZERO ? 0 : 1), "n"(LayoutA::TRANSPOSED), "n"(LayoutB::TRANSPOSED));
  }
}
