// Between the warps' fragments of an output tile and global memory, for the tensor-core kernels.
//
// OutputSlab: each warp moves 16 rows at a time through a slab of shared memory, so that neighbouring lanes take
// neighbouring columns (or rows, where the output's columns are what is contiguous) and whole sectors are read and
// written. The loop over these blocks stays rolled, to keep the code small; only the accesses to the fragments, which
// are registers, are written out for each block. RowPair: 16-bit outputs of Hopper's kernels.
#pragma once

#include "parts/epilogue.cuh"
#include "parts/load.cuh"
#include "parts/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"

// A warp holds ROWS x COLUMNS outputs, in fragments [ROWS / 16][COLUMNS / 8][4] as mma.sync lays them out: rows g and g
// + 8, columns 2t and 2t + 1 (g = lane / 4, t = lane % 4). WARP_ROWS warps of a CTA lie below one another, the next
// ones COLUMN_STEP columns to their right. OVERLAPS: tiles lie over one another (TileWalk::output), and of each only
// the outputs from its own place on are written.
template <int ROWS, int COLUMNS, int WARP_ROWS, int COLUMN_STEP = COLUMNS, bool OVERLAPS = false>
class OutputSlab {
 public:
  static constexpr int PITCH = COLUMNS + 8;     // floats; eight more keep the fragments' pairs free of bank conflicts
  static constexpr int BYTES = 16 * PITCH * 4;  // of shared memory, for one warp

  // slabs: BYTES of shared memory for each warp, 16-byte aligned. row, column: of the CTA's first output.
  //
  // The thread's index is read anew for each tile: what is computed from it would otherwise be kept in registers
  // throughout the main loop.
  DETKERN_INLINE OutputSlab(const GemmParams& p, unsigned char* slabs, const OutputTile& tile)
      : epilogue_(p, tile.batch), rows_contiguous_(p.out_row != 1 || p.out_col == 1) {
    const int thread = thread_index();
    const int warp = thread / 32;
    lane_ = thread % 32;
    slab_ = reinterpret_cast<float*>(slabs + warp * BYTES);
    row_ = tile.row + warp % WARP_ROWS * ROWS;
    column_ = tile.column + warp / WARP_ROWS * COLUMN_STEP;
  }

  // own: where the outputs begin that are the tile's.
  DETKERN_INLINE OutputSlab(const GemmParams& p, unsigned char* slabs, const OutputTile& tile, const OutputTile& own)
      : OutputSlab(p, slabs, tile) {
    own_row_ = own.row;
    own_column_ = own.column;
  }

  // What the chains start from.
  DETKERN_INLINE void load(float (&fragments)[ROWS / 16][COLUMNS / 8][4]) const {
#pragma unroll 1
    for (int block = 0; block < ROWS / 16; ++block) {
      fetch(block);
#pragma unroll
      for (int b = 0; b < ROWS / 16; ++b) {
        if (b == block) take(fragments[b]);
      }
      __syncwarp();
    }
  }

  // Finishes and writes the outputs. value(block, j, half) gives the float2 of rows g + 8 * half in columns 8 * j + 2t
  // and beyond. ADD_OUT: the output as it was is added first, where it accumulates.
  template <bool ADD_OUT, typename Value>
  DETKERN_INLINE void store(Value value) const {
#pragma unroll 1
    for (int block = 0; block < ROWS / 16; ++block) {
#pragma unroll
      for (int b = 0; b < ROWS / 16; ++b) {
        if (b == block) put([&](int j, int half) { return value(b, j, half); });
      }
      write<ADD_OUT>(block);
    }
  }

  // The steps of these, for kernels whose warps hold more columns than a slab does: `move` goes to others.
  DETKERN_INLINE void move(int columns) { column_ += columns; }

  // Fills the slab with what the chains of 16 rows start from.
  DETKERN_INLINE void fetch(int block) const {
    const int64_t first = row_ + 16 * block;
#pragma unroll 4
    for (int i = lane_; i < 16 * COLUMNS; i += 32) {
      const int row = rows_contiguous_ ? i / COLUMNS : i % 16, column = rows_contiguous_ ? i % COLUMNS : i / 16;
      slab_[row * PITCH + column] = epilogue_.initial(first + row, column_ + column);
    }
    __syncwarp();
  }

  // From the slab; then comes a __syncwarp().
  DETKERN_INLINE void take(float (&fragments)[COLUMNS / 8][4]) const {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 two = *pair(j, half);
        fragments[j][2 * half] = two.x;
        fragments[j][2 * half + 1] = two.y;
      }
    }
  }

  // Puts value(j, half) into the slab.
  template <typename Value>
  DETKERN_INLINE void put(Value value) const {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) *pair(j, half) = value(j, half);
    }
  }

  // Finishes and writes what the slab holds, 16 rows.
  template <bool ADD_OUT>
  DETKERN_INLINE void write(int block) const {
    __syncwarp();
    if (rows_contiguous_) {
      write_by_rows<ADD_OUT>(row_ + 16 * block);
    } else {
      write_by_columns<ADD_OUT>(row_ + 16 * block);
    }
    __syncwarp();
  }

 private:
  DETKERN_INLINE float2* pair(int j, int half) const {
    return reinterpret_cast<float2*>(slab_ + (lane_ / 4 + 8 * half) * PITCH + j * 8 + lane_ % 4 * 2);
  }

  DETKERN_INLINE bool owns(int64_t row, int64_t column) const {
    return !OVERLAPS || (row >= own_row_ && column >= own_column_);
  }

  template <bool ADD_OUT>
  DETKERN_INLINE void write_by_rows(int64_t first) const {
    constexpr int LANES = COLUMNS / 4;  // for one row, four columns each
    const int column = lane_ % LANES * 4;
    float bias[4];
    epilogue_.load_bias(column_ + column, bias);
#pragma unroll 1
    for (int row = lane_ / LANES; row < 16; row += 32 / LANES) {
      if (!owns(first + row, column_ + column)) continue;
      const float4 four = *reinterpret_cast<const float4*>(slab_ + row * PITCH + column);
      float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; ADD_OUT && i < 4; ++i) {
        values[i] = __fadd_rn(values[i], epilogue_.initial(first + row, column_ + column + i));
      }
      epilogue_.store(first + row, column_ + column, values, bias);
    }
  }

  template <bool ADD_OUT>
  DETKERN_INLINE void write_by_columns(int64_t first) const {
    const int row = lane_ % 16;
#pragma unroll 1
    for (int column = lane_ / 16; column < COLUMNS; column += 2) {
      if (!owns(first + row, column_ + column)) continue;
      float bias[1];
      epilogue_.load_bias(column_ + column, bias);
      float values[1] = {slab_[row * PITCH + column]};
      if (ADD_OUT) values[0] = __fadd_rn(values[0], epilogue_.initial(first + row, column_ + column));
      epilogue_.store(first + row, column_ + column, values, bias);
    }
  }

  Epilogue epilogue_;
  float* slab_;
  int64_t row_;
  int64_t column_;
  int64_t own_row_;
  int64_t own_column_;
  int lane_;
  bool rows_contiguous_;
};

// Where a lane writes 16-bit outputs of a warp group's 64 rows: in rows g and g + 8 of its warp's sixteen, as the
// fragments of wgmma have them, from column t * LANE_COLUMNS on (g = lane / 4, t = lane % 4).
template <int LANE_COLUMNS>
class RowPair {
 public:
  RowPair() = default;

  // batch: the elements of `out` before those of the batch. row, column: the group's first in the output; it has
  // `width` columns. any: whether this warp has rows. What a lane writes at once must be aligned, and not go beyond n.
  // Worked out where this stands, however late it is used.
  DETKERN_INLINE RowPair(const GemmParams& p, int64_t batch, int64_t row, int64_t column, int width, bool any = true) {
    const uint32_t thread = thread_index(), lane = thread % 32, first = lane % 4 * LANE_COLUMNS;
    row += thread % 128 / 32 * 16 + lane / 4;
    column += first;
    target_ = static_cast<uint16_t*>(p.out) + batch + row * p.out_row + column;
    next_ = 8 * p.out_row;
    columns_ = clamp(p.n - column, width - static_cast<int>(first));
    rows_ = any ? clamp((p.m - row + 7) / 8, 2) : 0;
    forget(target_);
    forget(next_);
    forget(columns_);
    forget(rows_);
  }

  // Of the two, those in the output.
  DETKERN_INLINE int rows() const { return rows_; }

  // Writes `value` to the columns from `column` + t * LANE_COLUMNS on, in row g + 8 * half, where that is in the
  // output.
  DETKERN_INLINE void store(int half, int column, uint32_t value) const {
    static_assert(LANE_COLUMNS == 2, "what a lane writes at once");
    if (within(half, column)) *reinterpret_cast<uint32_t*>(target_ + half * next_ + column) = value;
  }

  DETKERN_INLINE void store(int half, int column, uint4 value) const {
    static_assert(LANE_COLUMNS == 8, "what a lane writes at once");
    store_global_if(within(half, column), target_ + half * next_ + column, value);
  }

 private:
  DETKERN_INLINE bool within(int half, int column) const { return half < rows_ && column < columns_; }

  uint16_t* target_;
  int64_t next_;  // from a row to the eighth after it
  int columns_;   // of the group's, from this lane's first on, in the output
  int rows_;      // of the two, in the output
};
