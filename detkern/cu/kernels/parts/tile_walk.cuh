// Which output tiles a CTA of Hopper's kernels computes, one behind another.
#pragma once

#include "parts/params.cuh"
#include "parts/schedule.cuh"

// What the two CTAs of a cluster have in common: nothing (one CTA), the rows of A (their tiles lie beside one another)
// or the columns of B (below one another).
enum Shared : int { SHARED_NONE = 0, SHARED_A = 1, SHARED_B = 2 };

// The output tiles of a CTA: every gridDim.x-th, in bands of BAND tile rows as output_tile's. The CTAs of a cluster
// walk over pairs of tiles, and one of a pair may be outside the output. m, n and the number of tiles are below 2^31
// where operands come by TMA, so the divisions are of 32 bits: a grid of short chains waits for them.
// ROW_UNIT, COLUMN_UNIT: of which rows and columns that tiles start at are multiples: 8 where TMA copies along them or
// outputs are stored by 16 bytes. FEW_COLUMNS: of tiles, up to which a band is one row of tiles, or two where columns
// are odd: CTAs one behind the other run on a pair of multiprocessors, and read the same rows or the same columns.
template <int TILE_ROWS, int TILE_COLUMNS, int TILE_BAND, int SHARED_OPERAND, int ROW_UNIT, int COLUMN_UNIT = 8,
          uint32_t FEW_COLUMNS = 0>
class TileWalk {
  static constexpr int CTAS = SHARED_OPERAND == SHARED_NONE ? 1 : 2;
  static constexpr int ROWS = SHARED_OPERAND == SHARED_B ? 2 * TILE_ROWS : TILE_ROWS;
  static constexpr int COLUMNS = SHARED_OPERAND == SHARED_A ? 2 * TILE_COLUMNS : TILE_COLUMNS;
  static constexpr int BAND_ROWS = SHARED_OPERAND == SHARED_B ? TILE_BAND / 2 : TILE_BAND;

 public:
  // Takes the CTA's tiles number `turn`, turn + turns, turn + 2 * turns and so on.
  DETKERN_INLINE explicit TileWalk(const GemmParams& p, uint32_t turn = 0, uint32_t turns = 1)
      : p_(p), turns_(turns), tile_(blockIdx.x / CTAS + gridDim.x / CTAS * turn) {}

  // Sizes are computed where they are needed, since they would take registers throughout the main loop otherwise.
  DETKERN_INLINE bool more() const { return tile_ < count(); }

  DETKERN_INLINE void step() { tile_ += gridDim.x / CTAS * turns_; }

  // The tile that is computed: the CTA's, moved back to where it lies inside of the output. Copies of rows that are not
  // there take longer than those of rows that are, and a neighbour's outputs come out as the same bits.
  DETKERN_INLINE OutputTile output() const {
    OutputTile tile = own();
    tile.row = min(tile.row, static_cast<int64_t>(last_start<ROW_UNIT>(p_.m, TILE_ROWS)));
    tile.column = min(tile.column, static_cast<int64_t>(last_start<COLUMN_UNIT>(p_.n, TILE_COLUMNS)));
    return tile;
  }

  // The CTA's own tile, which may reach beyond the output. Its outputs are those of output() from here on.
  DETKERN_INLINE OutputTile own() const {
    const uint32_t in_one = rows() * columns();
    const uint32_t batch = p_.batch_rank == 0 ? 0 : tile_ / in_one;
    const uint32_t in_batch = tile_ - batch * in_one;
    const uint32_t highest = FEW_COLUMNS != 0 && columns() <= FEW_COLUMNS ? 1 + columns() % 2 : BAND_ROWS;
    const uint32_t band = rows() <= highest ? 0 : in_batch / (highest * columns());
    const uint32_t in_band = in_batch - band * (highest * columns());
    const uint32_t height = min(highest, rows() - band * highest);
    const uint32_t column = height == 1 ? in_band : in_band / height;
    const uint32_t row = band * highest + (in_band - column * height);
    OutputTile tile = {batch, static_cast<int64_t>(row) * ROWS, static_cast<int64_t>(column) * COLUMNS};
    if (SHARED_OPERAND == SHARED_A) tile.column += blockIdx.x % CTAS * TILE_COLUMNS;
    if (SHARED_OPERAND == SHARED_B) tile.row += blockIdx.x % CTAS * TILE_ROWS;
    return tile;
  }

  // Of the output: tiles, or pairs of them.
  DETKERN_INLINE uint32_t rows() const { return (static_cast<uint32_t>(p_.m) + ROWS - 1) / ROWS; }

  DETKERN_INLINE uint32_t columns() const { return (static_cast<uint32_t>(p_.n) + COLUMNS - 1) / COLUMNS; }

 private:
  // Where the last tile of `extent` starts that lies inside of `size`, or at 0 a larger one; at a multiple of UNIT.
  template <int UNIT>
  static DETKERN_INLINE int last_start(int64_t size, int extent) {
    return max(static_cast<int>(size) - extent + UNIT - 1, 0) / UNIT * UNIT;
  }

  // Without a branch: behind one, what products read would not stay in uniform registers.
  DETKERN_INLINE uint32_t count() const {
    return rows() * columns() * static_cast<uint32_t>(p_.batch_shape[0]) * static_cast<uint32_t>(p_.batch_shape[1]);
  }

  const GemmParams& p_;
  uint32_t turns_, tile_;
};
