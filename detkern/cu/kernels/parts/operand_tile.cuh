// Warp-group matrix products of Hopper (wgmma, sm_90a): operand tiles in shared memory as TMA writes them and as
// wgmma's descriptors know them. Section numbers are those of the PTX ISA 8.x.
//
// A tile is made of swizzle atoms of eight rows of 128 bytes. K_MAJOR: a row is 64 k of one m or n; panels of 64 k lie
// one behind another, each with all of the tile's rows. MN_MAJOR: a row is 64 m or n of one k; blocks of 64 m or n lie
// one behind another, each with all of the tile's k. In an atom the 16-byte chunks of a row are permuted by XOR with
// the row.
#pragma once

#include "parts/params.cuh"
#include "parts/schedule.cuh"
#include "ptx/tma.cuh"

constexpr int ATOM_ROW_BYTES = 128;
constexpr int ATOM = 64;  // 16-bit elements of a row of an atom

// LOAD: K_MAJOR or MN_MAJOR; of 8-bit elements wgmma takes K_MAJOR alone. ROWS: of m or n, EXTENT_K: of k, in the
// tile. SIZE: bytes of an element, 1 or 2.
template <int LOAD, int ROWS, int EXTENT_K, int SIZE = 2>
struct TmaTile {
  static constexpr bool MN_ROWS = LOAD == MN_MAJOR;
  static constexpr int LINES = ROWS, STAGE_K = EXTENT_K, ELEMENT_BYTES = SIZE;
  static constexpr int ATOM = ATOM_ROW_BYTES / SIZE;  // elements of a row of an atom
  static constexpr int TRANSPOSED = MN_ROWS ? 1 : 0;
  static constexpr int BOXES = MN_ROWS ? ROWS / ATOM : EXTENT_K / ATOM;
  static constexpr int REST = MN_ROWS ? ROWS % ATOM : 0;  // lines behind the boxes, which a narrower one brings
  static constexpr int BOX_BYTES = (MN_ROWS ? EXTENT_K : ROWS) * ATOM_ROW_BYTES;
  static constexpr int BYTES = (BOXES + (REST > 0)) * BOX_BYTES;
  static constexpr int BOX_ROWS = BOX_BYTES / ATOM_ROW_BYTES;
  static_assert(LOAD == K_MAJOR || LOAD == MN_MAJOR, "TMA copies contiguous rows");
  static_assert(SIZE == 2 || (SIZE == 1 && LOAD == K_MAJOR), "wgmma transposes 16-bit elements alone");
  static_assert(MN_ROWS ? REST % 16 == 0 : EXTENT_K % ATOM == 0 && ROWS % 8 == 0,
                "a tile must be whole atoms, but for its last lines along m or n");
  static_assert((MN_ROWS ? EXTENT_K : ROWS) <= 256, "a box of TMA has at most 256 rows");

  // Starts the copy of the lines behind the boxes, by a map of boxes of REST.
  static DETKERN_INLINE void copy_rest(uint32_t tile, const TensorMap& map, int row, int k, BatchIndex batch,
                                       uint32_t barrier) {
    static_assert(REST > 0, "there are some");
    copy_tensor_box<Copy::PLAIN>(tile + BOXES * BOX_BYTES, map, row + BOXES * ATOM, k, batch.inner, batch.outer,
                                 barrier);
  }

  // The words of a descriptor (9.7.15.5.1.2) but for its address. Low: the offset between blocks of 64 m or n (where
  // rows are along these); high: the offset between atoms, the swizzle of 128 bytes.
  static constexpr uint32_t DESCRIPTOR_LOW = (MN_ROWS ? EXTENT_K * ATOM_ROW_BYTES >> 4 : 1) << 16;
  static constexpr uint32_t DESCRIPTOR_HIGH = (8 * ATOM_ROW_BYTES >> 4) | 1u << 30;

  // The offset in bytes of one step's k (32 bytes of them), numbered `step`, from row `row` on, a multiple of 8
  // (MN_MAJOR: of 64).
  static constexpr DETKERN_INLINE uint32_t offset(int row, int step) {
    return MN_ROWS ? row / ATOM * EXTENT_K * ATOM_ROW_BYTES + step * 16 * ATOM_ROW_BYTES
                   : (step / 4 * ROWS + row) * ATOM_ROW_BYTES + step % 4 * 32;
  }

  // The low word of the descriptor of shared-memory address `address`. All of shared memory is within its 14 bits of
  // 16 bytes, so an offset in the tile can be added (divided by 16). Above 18 bits an address names a CTA of the
  // cluster.
  static DETKERN_INLINE uint32_t low_word(uint32_t address) { return DESCRIPTOR_LOW | (address & 0x3ffff) >> 4; }

  // The descriptor of what lies `offset` bytes behind the place that `low` describes: one addition each, since these
  // come between one wgmma and the next.
  static DETKERN_INLINE uint64_t descriptor(uint32_t low, uint32_t offset) {
    return static_cast<uint64_t>(DESCRIPTOR_HIGH) << 32 | (low + offset / 16);
  }

  // Starts the copies of the tile at (row, k) of batch `batch`; `barrier` counts the bytes of the map's boxes. Zeros
  // stand for what is outside the operand. whole: the map gives all boxes at once (tensor_map.py) and has one batch
  // dimension, else they are copied one by one. TO_BOTH: CTA `rank` of the cluster copies half of the boxes, or of a
  // single box half of the rows; the map's boxes are so large. few: one box has all that there is.
  template <Copy COPY>
  static DETKERN_INLINE void copy(uint32_t tile, const TensorMap& map, int row, int k, BatchIndex batch,
                                  uint32_t barrier, bool whole, uint32_t rank = 0, bool few = false) {
    constexpr int PARTS = COPY == Copy::TO_BOTH ? 2 : 1;
    constexpr int PART_BOXES = BOXES == 1 ? 1 : BOXES / PARTS, PART_ROWS = BOXES == 1 ? BOX_ROWS / PARTS : BOX_ROWS;
    static_assert((BOXES == 1 || BOXES % PARTS == 0) && PART_ROWS % 8 == 0, "parts of whole atoms");
    const int part = PARTS == 1 ? 0 : rank;
    const int first_box = BOXES == 1 ? 0 : part * PART_BOXES, first_row = BOXES == 1 ? part * PART_ROWS : 0;
    const int x = (MN_ROWS ? row : k) + first_box * ATOM, y = (MN_ROWS ? k : row) + first_row;
    tile += first_box * BOX_BYTES + first_row * ATOM_ROW_BYTES;
    if (whole) {
      copy_tensor_box<COPY>(tile, map, 0, y, static_cast<uint32_t>(x) / ATOM, batch.outer, barrier);
      return;
    }
#pragma unroll
    for (int box = 0; box < PART_BOXES; ++box) {
      if (box != 0 && few) break;
      copy_tensor_box<COPY>(tile + box * BOX_BYTES, map, x + box * ATOM, y, batch.inner, batch.outer,
                            barrier);
    }
  }
};
