// Which tiles of logits a CTA of linear_logp_wgmma.cu computes: of a vocabulary whose parts begin at multiples of 8.
#pragma once

#include "parts/schedule.cuh"
#include "parts/tile_walk.cuh"

// A tile of logits. column: its first, of the weight that is given; end: where its part ends there. place: its number
// among the part's tiles; part: which of those that are given.
struct LogitTile {
  int row, column, end, place, part;
};

// The sizes of the walk. rows: of hidden. tile_columns: of tiles, of all parts, the last of which has columns.
struct PartSizes {
  int32_t rows, columns, part_columns, part_tiles, tile_columns;
};

// The tiles of a CTA: every gridDim.x-th, in bands of TILE_BAND tile rows, column by column, part by part. A tile
// reaches beyond its part's end where that is no multiple of its width. The CTAs of a cluster (SHARED_B) have tiles
// below one another.
template <int TILE_ROWS, int TILE_COLUMNS, int TILE_BAND, int SHARED_OPERAND>
class PartWalk {
  static constexpr int CTAS = SHARED_OPERAND == SHARED_NONE ? 1 : 2;
  static constexpr int ROWS = CTAS * TILE_ROWS;
  static constexpr uint32_t BAND_ROWS = TILE_BAND / CTAS;
  static_assert(SHARED_OPERAND != SHARED_A, "tiles beside one another may be of two parts");

 public:
  // Takes the CTA's tiles number `turn`, turn + turns, turn + 2 * turns and so on.
  DETKERN_INLINE explicit PartWalk(const PartSizes& sizes, uint32_t turn = 0, uint32_t turns = 1)
      : sizes_(sizes), turns_(turns), tile_(blockIdx.x / CTAS + gridDim.x / CTAS * turn) {}

  DETKERN_INLINE bool more() const { return tile_ < rows() * static_cast<uint32_t>(sizes_.tile_columns); }

  DETKERN_INLINE void step() { tile_ += gridDim.x / CTAS * turns_; }

  // The last rows' tile is moved back to where it ends inside, as TileWalk's.
  DETKERN_INLINE LogitTile tile() const {
    const uint32_t columns = sizes_.tile_columns;
    const uint32_t band = rows() <= BAND_ROWS ? 0 : tile_ / (BAND_ROWS * columns);
    const uint32_t in_band = tile_ - band * (BAND_ROWS * columns);
    const uint32_t height = min(BAND_ROWS, rows() - band * BAND_ROWS);
    const uint32_t column = height == 1 ? in_band : in_band / height;
    const uint32_t row = band * BAND_ROWS + (in_band - column * height);
    LogitTile tile;
    tile.row = static_cast<int>(row) * ROWS + (CTAS == 1 ? 0 : static_cast<int>(blockIdx.x % CTAS) * TILE_ROWS);
    tile.row = min(tile.row, max(sizes_.rows - TILE_ROWS, 0));
    tile.part = static_cast<int>(column / static_cast<uint32_t>(sizes_.part_tiles));
    tile.place = static_cast<int>(column) - tile.part * sizes_.part_tiles;
    tile.column = tile.part * sizes_.part_columns + tile.place * TILE_COLUMNS;
    tile.end = min((tile.part + 1) * sizes_.part_columns, sizes_.columns);
    return tile;
  }

  DETKERN_INLINE OutputTile output() const {
    const LogitTile found = tile();
    return {0, found.row, found.column};
  }

  // Of tiles, or of pairs of them.
  DETKERN_INLINE uint32_t rows() const { return (static_cast<uint32_t>(sizes_.rows) + ROWS - 1) / ROWS; }

 private:
  const PartSizes& sizes_;
  uint32_t turns_, tile_;
};
