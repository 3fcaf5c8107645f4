// Tiles of 16-bit operands in shared memory for the tensor-core kernels: their layout, and the fragments read from
// them.
//
// A tile lies in rows along k (K_MAJOR and STRIDED) or along m or n (MN_MAJOR). The 16-byte chunks of a row are
// permuted by XOR with the row so that both the eight lanes that read one chunk column of eight rows, as ldmatrix does,
// and the eight that write one row touch all 32 banks.
#pragma once

#include "parts/load.cuh"
#include "parts/params.cuh"
#include "ptx/mma.cuh"

template <int LOAD, int EXTENT_MN, int EXTENT_K>
struct TileLayout {
  static constexpr bool MN_ROWS = LOAD == MN_MAJOR;  // a row holds one k
  static constexpr int CHUNKS = (MN_ROWS ? EXTENT_MN : EXTENT_K) / 8;  // of 16 bytes, in one row
  static constexpr int ROW_BYTES = CHUNKS * 16;
  static constexpr int BYTES = EXTENT_MN * EXTENT_K * 2;
  static_assert(CHUNKS >= 2 && (CHUNKS & (CHUNKS - 1)) == 0, "a row must be a power of two of chunks");
  static_assert(EXTENT_K % 32 == 0 && EXTENT_MN % 16 == 0, "a tile must be whole fragments, an even number along k");

  DETKERN_INLINE uint32_t operator()(int row, int chunk) const {
    const int swizzle = CHUNKS >= 8 ? row & 7 : (row / (8 / CHUNKS)) & (CHUNKS - 1);  // repeats every eight rows
    return row * ROW_BYTES + ((chunk ^ swizzle) << 4);
  }
};

// Where one warp's fragments lie in a tile. A fragment is ldmatrix's four 8 x 8 matrices, SPAN_MN along m or n by
// SPAN_K along k, in ascending order, m or n first where MN_FIRST. The warp's extent along m or n is a power of two and
// a tile starts at a multiple of its rows' size, so that a fragment's indices fill bits of the chunk index that are
// zero: XOR sets them, and the swizzle commutes with it.
template <class Layout, int SPAN_MN, int SPAN_K, bool MN_FIRST>
class FragmentAddress {
 public:
  DETKERN_INLINE FragmentAddress(int warp_mn, int lane) {
    static_assert(SPAN_MN * SPAN_K == 256, "a fragment is four matrices");
    const int matrix = lane / 8, row = lane % 8;
    const int mn8 = MN_FIRST ? matrix % (SPAN_MN / 8) : matrix / (SPAN_K / 8);
    const int k8 = MN_FIRST ? matrix / (SPAN_MN / 8) : matrix % (SPAN_K / 8);
    lane_ = Layout::MN_ROWS ? Layout{}(k8 * 8 + row, warp_mn / 8 + mn8) : Layout{}(warp_mn + mn8 * 8 + row, k8);
  }

  // The fragment that starts at m or n = SPAN_MN * mn, counted from the warp's first, and k = SPAN_K * k.
  DETKERN_INLINE void load(uint32_t (&fragment)[4], uint32_t tile, int mn, int k) const {
    if constexpr (Layout::MN_ROWS) {
      uint32_t lane = lane_;
      asm volatile("" : "+r"(lane));  // an XOR a fragment, or each index takes a register throughout the main loop
      load_matrix_x4_transposed(fragment, tile + (lane ^ (mn * SPAN_MN * 2)) + k * SPAN_K * Layout::ROW_BYTES);
    } else {
      load_matrix_x4(fragment, tile + (lane_ ^ (k * SPAN_K * 2)) + mn * SPAN_MN * Layout::ROW_BYTES);
    }
  }

 private:
  uint32_t lane_;
};

// The operands of mma.sync: A's matrices are (m, k) = (0, 0), (8, 0), (0, 8), (8, 8); B's (n, k) = (0, 0), (0, 8), (8,
// 0), (8, 8) for 16 columns of one step, (0, 0), (0, 8), (0, 16), (0, 24) for 8 columns of two.
template <class Layout>
using FragmentA = FragmentAddress<Layout, 16, 16, true>;
template <class Layout>
using FragmentB = FragmentAddress<Layout, 16, 16, false>;
template <class Layout>
using DeepFragmentB = FragmentAddress<Layout, 8, 32, false>;
