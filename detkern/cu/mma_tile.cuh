// Tiles of 16-bit operands in shared memory for the tensor-core kernels: their layout, and the fragments read from them.
//
// A tile lies in rows along k (K_MAJOR and STRIDED) or along m or n (MN_MAJOR). The 16-byte chunks of a row are permuted
// by XOR with the row so that both the eight lanes that read one chunk column of eight rows, as ldmatrix does, and the
// eight that write one row touch all 32 banks.
#pragma once

#include "load.cuh"

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

// Where one warp's fragments lie in a tile: (tile, k16, block) is the lane's ldmatrix address for the 16 k from 16 * k16 on
// and the 16 m or n from 16 * block on, counted from the warp's first. The warp's extent along m or n is a power of two
// and a tile starts at a multiple of its rows' size, so that block and k16 fill bits of the chunk index that are zero:
// XOR sets them, and the swizzle commutes with it.
template <class Layout>
class FragmentAddress {
 public:
  // IS_A: ldmatrix's four matrices are (m, k) = (0, 0), (8, 0), (0, 8), (8, 8). Else (n, k) = (0, 0), (0, 8), (8, 0), (8, 8).
  DETKERN_INLINE FragmentAddress(bool is_a, int warp_mn, int lane) {
    const int matrix = lane / 8, row = lane % 8;
    const int mn8 = is_a ? matrix % 2 : matrix / 2, k8 = is_a ? matrix / 2 : matrix % 2;
    lane_ = Layout::MN_ROWS ? Layout{}(k8 * 8 + row, warp_mn / 8 + mn8) : Layout{}(warp_mn + mn8 * 8 + row, k8);
  }

  DETKERN_INLINE uint32_t operator()(uint32_t tile, int k16, int block) const {
    return Layout::MN_ROWS ? tile + (lane_ ^ (block << 5)) + k16 * 16 * Layout::ROW_BYTES
                           : tile + (lane_ ^ (k16 << 5)) + block * 16 * Layout::ROW_BYTES;
  }

  DETKERN_INLINE void load(uint32_t (&fragment)[4], uint32_t tile, int k16, int block) const {
    if constexpr (Layout::MN_ROWS) {
      load_matrix_x4_transposed(fragment, (*this)(tile, k16, block));
    } else {
      load_matrix_x4(fragment, (*this)(tile, k16, block));
    }
  }

 private:
  uint32_t lane_;
};
