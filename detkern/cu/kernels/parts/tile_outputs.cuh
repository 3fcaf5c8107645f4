// The outputs of a warp group's tile on Hopper: from the accumulators of wgmma to memory, and back where products are
// added to what is there.
#pragma once

#include "parts/epilogue.cuh"
#include "parts/mma_epilogue.cuh"
#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/roles.cuh"
#include "parts/schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

// How a tile's outputs are written. What is usual has a loop over tiles of its own, so that its last instructions
// stand right behind the products: those that lie elsewhere are no longer in a cache when a grid has read its
// operands, and each line of them takes as long as memory. The others are apart for the sake of the products' uniform
// registers.
enum class Outputs {
  ROUNDED,  // of the operands' type, only rounded, with a tensor map and at most one batch dimension
  SIXTEEN,  // any other 16-bit ones with a map: a bias, the other type, or two batch dimensions
  QUADS,    // binary32 in rows by 16 bytes, new or accumulated, without a bias
  ANY,      // any strides
};

DETKERN_INLINE constexpr bool has_map(Outputs outputs) {
  return outputs == Outputs::ROUNDED || outputs == Outputs::SIXTEEN;
}

// Columns of the outputs that pass through shared memory at once: the largest divisor of `columns` that is a multiple
// of 8 and at most `limit`.
DETKERN_INLINE constexpr int slab_columns(int columns, int limit) {
  int width = limit;
  while (width > 8 && (columns % width != 0 || width % 8 != 0)) --width;
  return width;
}

// Of a tile of ROWS x COLUMNS outputs. BOXES_AT_ONCE: boxes of 64 columns that a warp's slab holds, where COLUMNS is a
// multiple of 64. TURNED: the tile's rows are the output's columns.
template <int ROWS, int COLUMNS, int BOXES_AT_ONCE, bool TURNED>
class TileOutputs {
 public:
  // Of 64 rows: MainLoop's.
  using Accumulators = float[COLUMNS / 8][4];

  // Of 16-bit outputs. BOXED: TMA writes them, from boxes of 16 rows by 64 columns, in rows of 128 bytes swizzled as
  // the operands'.
  static constexpr bool BOXED = COLUMNS % ATOM == 0 && !TURNED;
  static constexpr int BOX_BYTES = 16 * ATOM_ROW_BYTES;
  static constexpr int WORD_SLAB_N = COLUMNS < 32 ? COLUMNS : 32;
  static constexpr int WORD_SLAB_PITCH = 2 * WORD_SLAB_N + 16;  // bytes; sixteen more spread most rows over the banks
  static constexpr int WORD_SLAB_BYTES = BOXED ? BOXES_AT_ONCE * BOX_BYTES : 16 * WORD_SLAB_PITCH;
  static constexpr int SLAB_N = slab_columns(COLUMNS, 32);  // of binary32
  static constexpr int PARTS = COLUMNS / SLAB_N;
  using WarpOutput = OutputSlab<16, SLAB_N, 4, 0, true>;
  static constexpr int LARGER_SLAB = WarpOutput::BYTES > WORD_SLAB_BYTES ? WarpOutput::BYTES : WORD_SLAB_BYTES;
  static constexpr int TURNED_SLAB_BYTES = COLUMNS * ATOM_ROW_BYTES / 4;  // a quarter of a group's
  static constexpr int SLAB_BYTES = TURNED  ? TURNED_SLAB_BYTES
                                    : BOXED ? (LARGER_SLAB + 1023) / 1024 * 1024
                                            : LARGER_SLAB;
  static constexpr int BLOCK_ROWS = ROWS < 64 ? ROWS : 64;  // of 64 rows, those that are a tile's
  static_assert(!BOXED || COLUMNS % (BOXES_AT_ONCE * ATOM) == 0, "all slabs are full");

  // Whether this warp's 16 rows of 64 are a tile's. The same in all lanes, and known to be: else the main loop would
  // end in a barrier of the warp.
  static DETKERN_INLINE bool has_rows() {
    return BLOCK_ROWS == 64 || __shfl_sync(~0u, thread_index() / 32, 0) * 16 < BLOCK_ROWS;
  }

  // A part of 64 rows' accumulators, as wide as a slab.
  using SlabFragments = float[SLAB_N / 8][4];
  static DETKERN_INLINE SlabFragments& slab_part(Accumulators& acc, int part) {
    return reinterpret_cast<SlabFragments&>(acc[part * (SLAB_N / 8)]);
  }

  // The two outputs of fragment `j` (eight columns each) in row g + 8 * half, rounded.
  template <int DTYPE>
  static DETKERN_INLINE uint32_t word(const Accumulators& acc, int j, int half) {
    return round_pair<DTYPE>(acc[j][2 * half], acc[j][2 * half + 1]);
  }

  // Writes 16-bit outputs by TMA, from this warp's slab; the last boxes may still be on their way at the return.
  template <int DTYPE>
  static DETKERN_INLINE void store_boxes(const TensorMap& map_out, const OutputTile& tile, BatchIndex batch,
                                         uint32_t slab, const Accumulators& acc) {
    const int thread = thread_index(), lane = thread % 32, row = lane % 16;
    const uint32_t target = slab + row * ATOM_ROW_BYTES + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
    for (int first = 0; first < COLUMNS / ATOM; first += BOXES_AT_ONCE) {
      if (elected()) store_tensor_wait_read();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < BOXES_AT_ONCE * ATOM / 8; j += 2) {
        const int column = first * ATOM / 8 + j;
        store_matrices((target ^ j % 8 << 4) + j / 8 * BOX_BYTES, word<DTYPE>(acc, column, 0),
                       word<DTYPE>(acc, column, 1), word<DTYPE>(acc, column + 1, 0), word<DTYPE>(acc, column + 1, 1));
      }
      fence_async_proxy();
      __syncwarp();
      if (has_rows() && elected()) {
#pragma unroll
        for (int box = 0; box < BOXES_AT_ONCE; ++box) {
          store_tensor_box(map_out, tile.column + (first + box) * ATOM, tile.row + thread / 32 % 4 * 16, batch.inner,
                           batch.outer, slab + box * BOX_BYTES);
        }
        store_tensor_commit();
      }
    }
  }

  // The elements of `out` before those of a batch, where the operands have maps and so at most two batch dimensions.
  // batch_offset, for any number, is some 320 instructions.
  static DETKERN_INLINE int64_t batch_start(const GemmParams& p, BatchIndex batch) {
    return batch.outer * p.out_batch[0] + batch.inner * p.out_batch[1];
  }

  // Writes 16-bit outputs by 16 bytes a lane, at most WORD_SLAB_N columns at a time, through this warp's slab.
  template <int DTYPE>
  static DETKERN_INLINE void store_words(const GemmParams& p, const OutputTile& tile, BatchIndex batch, uint32_t slab,
                                         const Accumulators& acc) {
    const uint32_t lane = thread_index() % 32;
    const uint32_t target = slab + lane % 16 * WORD_SLAB_PITCH + lane / 16 * 16;
    const uint32_t source = slab + lane / 4 * WORD_SLAB_PITCH + lane % 4 * 16;
    const RowPair<8> rows(p, batch_start(p, batch), tile.row, tile.column, COLUMNS, has_rows());
#pragma unroll
    for (int first = 0; first < COLUMNS; first += WORD_SLAB_N) {
#pragma unroll
      for (int j = first / 8; j < min(first + WORD_SLAB_N, COLUMNS) / 8; j += 2) {
        const uint32_t place = target + (j - first / 8) * 16;
        if (j + 1 < COLUMNS / 8) {
          store_matrices(place, word<DTYPE>(acc, j, 0), word<DTYPE>(acc, j, 1), word<DTYPE>(acc, j + 1, 0),
                         word<DTYPE>(acc, j + 1, 1));
        } else {
          store_matrices(place, word<DTYPE>(acc, j, 0), word<DTYPE>(acc, j, 1));
        }
      }
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.store(half, first, load_shared_v4(source + half * 8 * WORD_SLAB_PITCH));
      }
      __syncwarp();
    }
  }

  // Writes the 16-bit outputs of a swapped tile's group by TMA, from the group's slab, whose rows are the tile's
  // columns, swizzled as boxes are. slab: this warp's quarter, which tells where the group's begins.
  template <int DTYPE>
  static DETKERN_INLINE void store_columns(const TensorMap& map_out, const OutputTile& tile, BatchIndex batch,
                                           uint32_t slab, const Accumulators& acc) {
    const int thread = thread_index(), lane = thread % 32;
    const int warp_of_cta = __shfl_sync(~0u, thread / 32, 0);  // the same in all lanes, and known to be
    const int warp = warp_of_cta % 4, barrier = GROUP_BARRIER + warp_of_cta / 4;
    slab -= warp * SLAB_BYTES;
    if (warp == 0 && elected()) store_tensor_wait_read();
    named_barrier<GROUP>(barrier);
    // A lane's column of each two pieces, and the sixteen bytes of it that its eight rows are: 2 * warp or the next.
    const int column = lane / 16 * 8 + lane % 8;
    const uint32_t target = slab + column * ATOM_ROW_BYTES + ((2 * warp + lane / 8 % 2 ^ column % 8) << 4);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
      const uint32_t place = target + j * 8 * ATOM_ROW_BYTES;
      if (j + 1 < COLUMNS / 8) {
        store_matrices_transposed(place, word<DTYPE>(acc, j, 0), word<DTYPE>(acc, j, 1), word<DTYPE>(acc, j + 1, 0),
                                  word<DTYPE>(acc, j + 1, 1));
      } else {
        store_matrices_transposed(place, word<DTYPE>(acc, j, 0), word<DTYPE>(acc, j, 1));
      }
    }
    fence_async_proxy();
    named_barrier<GROUP>(barrier);
    if (warp == 0 && elected()) {
      store_tensor_box(map_out, tile.row, tile.column, batch.inner, batch.outer, slab);
      store_tensor_commit();
    }
  }

  template <int DTYPE>
  static DETKERN_INLINE void store_rounded(const GemmParams& p, const TensorMap& map_out, const OutputTile& tile,
                                           BatchIndex batch, uint32_t slab, const Accumulators& acc) {
    if constexpr (TURNED) {
      store_columns<DTYPE>(map_out, tile, batch, slab, acc);
    } else if constexpr (BOXED) {
      store_boxes<DTYPE>(map_out, tile, batch, slab, acc);
    } else {
      store_words<DTYPE>(p, tile, batch, slab, acc);
    }
  }

  static DETKERN_INLINE uint32_t warp_slab(unsigned char* slabs) {
    return shared_address(slabs) + thread_index() / 32 * SLAB_BYTES;
  }

  // Finishes and writes 64 rows of 16-bit outputs with a map, the first of which is tile.row.
  static DETKERN_INLINE void finish_sixteen(const GemmParams& p, const TensorMap& map_out, const OutputTile& tile,
                                            uint32_t slab, Accumulators& acc) {
    add_bias(p, tile, acc);
    if (p.out_dtype == F16) {
      store_rounded<F16>(p, map_out, tile, BatchIndex(p, tile.batch), slab, acc);
    } else {
      store_rounded<BF16>(p, map_out, tile, BatchIndex(p, tile.batch), slab, acc);
    }
  }

  // Whether outputs without a map go to memory from registers: 16-bit ones along rows, which start anywhere.
  static DETKERN_INLINE bool along_rows(const GemmParams& p) { return p.out_col == 1 && p.out_dtype != F32; }

  // Finishes and writes 64 rows of them. The four lanes of a row write 16 bytes of it, by words where these are
  // aligned.
  static DETKERN_INLINE void finish_rows(const GemmParams& p, const OutputTile& tile, Accumulators& acc) {
    add_bias(p, tile, acc);
    const int thread = thread_index(), lane = thread % 32;
    const int64_t row = tile.row + thread % 128 / 32 * 16 + lane / 4, column = tile.column + lane % 4 * 2;
    const int end = clamp(p.n - column, COLUMNS);
    uint16_t* line =
        static_cast<uint16_t*>(p.out) + batch_start(p, BatchIndex(p, tile.batch)) + row * p.out_row + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool has_row = has_rows() && row + 8 * half < p.m, aligned = reinterpret_cast<uint64_t>(line) % 4 == 0;
      if (has_row) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
          if (8 * j >= end) continue;
          const uint32_t two = p.out_dtype == F16 ? word<F16>(acc, j, half) : word<BF16>(acc, j, half);
          if (aligned && 8 * j + 1 < end) {
            *reinterpret_cast<uint32_t*>(line + 8 * j) = two;
          } else {
            line[8 * j] = static_cast<uint16_t>(two);
            if (8 * j + 1 < end) line[8 * j + 1] = static_cast<uint16_t>(two >> 16);
          }
        }
      }
      line += 8 * p.out_row;
    }
  }

  // Calls what(j, half, there, at) for the binary32 outputs of 64 rows by 16 bytes: of row g + 8 * half, at `at`, if
  // they are there and the tile's own. Of fragments j and j + 1 an even lane has four columns of the first, the odd
  // lane beside it four of the second, so that a row's four lanes have 64 bytes side by side: by 8 bytes a lane, a
  // sector a row, memory was written at two thirds of the rate.
  template <typename What>
  static DETKERN_INLINE void for_each_quad(const GemmParams& p, const OutputTile& tile, const OutputTile& own,
                                           const What& what) {
    const int thread = thread_index(), lane = thread % 32;
    const int64_t row = tile.row + thread % 128 / 32 * 16 + lane / 4;
    const int64_t column = tile.column + lane % 4 / 2 * 4 + lane % 2 * 8;
    // Of this lane's columns, from its first on.
    const int begin = static_cast<int>(own.column - column), end = static_cast<int>(p.n - column);
    float* line = static_cast<float*>(p.out) + batch_start(p, BatchIndex(p, tile.batch)) + row * p.out_row + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool has_row = has_rows() && row + 8 * half >= own.row && row + 8 * half < p.m;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j += 2) {
        const bool there = has_row && 8 * j >= begin && 8 * j < end && (j + 1 < COLUMNS / 8 || lane % 2 == 0);
        what(j, half, there, reinterpret_cast<float4*>(line + 8 * j));
      }
      line += 8 * p.out_row;
    }
  }

  // From the lanes of an accumulator, which have two columns of both fragments, to those of for_each_quad.
  static DETKERN_INLINE float4 exchanged(float4 quad) {
    const bool odd = thread_index() % 2;
    const float x = __shfl_xor_sync(~0u, odd ? quad.x : quad.z, 1);
    const float y = __shfl_xor_sync(~0u, odd ? quad.y : quad.w, 1);
    return odd ? make_float4(x, y, quad.z, quad.w) : make_float4(quad.x, quad.y, x, y);
  }

  // The outputs of fragment j and the next in row g + 8 * half, where there is a next one.
  static DETKERN_INLINE float4 quad_of(const Accumulators& acc, int j, int half) {
    const bool two = j + 1 < COLUMNS / 8;
    return make_float4(acc[j][2 * half], acc[j][2 * half + 1], two ? acc[two ? j + 1 : j][2 * half] : 0.0f,
                       two ? acc[two ? j + 1 : j][2 * half + 1] : 0.0f);
  }

  // Fetches the own ones of 64 rows of outputs that a product starts from: by 8 bytes, straight into the accumulators,
  // whose registers four columns of a row are not beside one another in.
  static DETKERN_INLINE void fetch_quads(const GemmParams& p, const OutputTile& tile, const OutputTile& own,
                                         Accumulators& acc) {
    const int thread = thread_index(), lane = thread % 32;
    const int64_t row = tile.row + thread % 128 / 32 * 16 + lane / 4, column = tile.column + lane % 4 * 2;
    const int begin = static_cast<int>(own.column - column), end = static_cast<int>(p.n - column);
    const float* line =
        static_cast<const float*>(p.out) + batch_start(p, BatchIndex(p, tile.batch)) + row * p.out_row + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (has_rows() && row + 8 * half >= own.row && row + 8 * half < p.m) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
          if (8 * j < begin || 8 * j >= end) continue;
          const float2 start = load_global_line(reinterpret_cast<const float2*>(line + 8 * j));
          acc[j][2 * half] = start.x, acc[j][2 * half + 1] = start.y;
        }
      }
      line += 8 * p.out_row;
    }
  }

  // Finishes and writes 64 rows of binary32 outputs, those from `own` on: an accumulated one must be written once.
  template <int HINT>
  static DETKERN_INLINE void finish_quads(const GemmParams& p, const OutputTile& tile, const OutputTile& own,
                                          const Accumulators& acc) {
    for_each_quad(p, tile, own, [&](int j, int half, bool there, float4* at) {
      float4 quad = exchanged(quad_of(acc, j, half));
      quad.x = __fadd_rn(quad.x, 0.0f), quad.y = __fadd_rn(quad.y, 0.0f);
      quad.z = __fadd_rn(quad.z, 0.0f), quad.w = __fadd_rn(quad.w, 0.0f);
      if (HINT == 0) {
        if (there) *at = quad;
      } else {
        if (there) store_streaming(at, quad);
      }
    });
  }

  // Asks the L2 cache for 64 rows of outputs that a product will start from.
  static DETKERN_INLINE void prefetch_quads(const GemmParams& p, const OutputTile& tile) {
    const int64_t row = tile.row + thread_index() % 128 / 2;
    if (!has_rows() || row >= p.m) return;
    const float* line = static_cast<const float*>(p.out) + batch_start(p, BatchIndex(p, tile.batch)) + row * p.out_row;
#pragma unroll
    for (int column = thread_index() % 2 * 32; column < COLUMNS; column += 64) {
      if (tile.column + column < p.n) prefetch_l2(line + tile.column + column);
    }
  }

  // Finishes and writes 64 rows of any outputs, those from `own` on: an accumulated one must be written once.
  static DETKERN_INLINE void finish_any(const GemmParams& p, const OutputTile& tile, const OutputTile& own,
                                        unsigned char* slabs, const Accumulators& acc) {
    WarpOutput output(p, slabs, tile, own);
    // Rolled, but for the accesses to the accumulators, which are registers.
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int b = 0; b < PARTS; ++b) {
        if (b != part) continue;
        output.put([&](int j, int half) {
          const float (&fragment)[4] = acc[b * (SLAB_N / 8) + j];
          return make_float2(fragment[2 * half], fragment[2 * half + 1]);
        });
      }
      if (has_rows()) output.write<false>(0);
      output.move(SLAB_N);
    }
  }

  // Fetches the outputs that a product starts from. tile: of the first block of 64 rows.
  template <int BLOCKS>
  static DETKERN_INLINE void fetch_outputs(const GemmParams& p, OutputTile tile, unsigned char* slabs,
                                           Accumulators (&acc)[BLOCKS]) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      if (!has_rows()) continue;
      WarpOutput output(p, slabs, tile);
#pragma unroll 1
      for (int part = 0; part < PARTS; ++part) {
        output.fetch(0);
#pragma unroll
        for (int b = 0; b < PARTS; ++b) {
          if (b == part) output.take(slab_part(acc[block], b));
        }
        __syncwarp();
        output.move(SLAB_N);
      }
      tile.row += 64;
    }
  }

 private:
  // A chain from +0 never ends at -0, so that the contract's + 0 changes nothing before a rounding to 16 bits.
  static DETKERN_INLINE void add_bias(const GemmParams& p, const OutputTile& tile, Accumulators& acc) {
    if (p.bias_dtype != NONE && TURNED) {
      const int64_t row = tile.row + thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4;
      const float bias[2] = {bias_at(p, row, p.m), bias_at(p, row + 8, p.m)};
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) registers(acc)[i] = __fadd_rn(registers(acc)[i], bias[i / 2 % 2]);
    } else if (p.bias_dtype != NONE) {
      const Epilogue epilogue(p, tile.batch);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        SlabFragments& fragments = slab_part(acc, part);
#pragma unroll
        for (int j = 0; j < SLAB_N / 8; ++j) {
          float bias[2];
          epilogue.load_bias(tile.column + part * SLAB_N + 8 * j + thread_index() % 4 * 2, bias);
#pragma unroll
          for (int i = 0; i < 4; ++i) fragments[j][i] = __fadd_rn(fragments[j][i], bias[i % 2]);
        }
      }
    }
  }

  static DETKERN_INLINE float (&registers(Accumulators& acc))[COLUMNS / 2] {
    return reinterpret_cast<float (&)[COLUMNS / 2]>(acc);
  }
};
