// Contract mma16 (wgmma m64nNk16, sm_90a only), f16 and bf16: each output one chain of tensor-core steps of 16 k,
// ascending, from +0 or from the output. The bits are mma.cu's.
//
// Roles. Warp groups consume, each GROUP_M rows of a tile. All of a tile's groups work on it together, or (IN_TURN) two
// groups have a tile each, so that one finishes and writes its outputs while the other multiplies. One more warp
// produces: one thread of it fills a ring of STAGES stages by TMA (parts/ring.cuh) and runs ahead into the next tile.
// Few rows. A tile of 16 or 32 rows has no more in a stage; wgmma reads 64, and what it finds in the others' place,
// which may be changing, goes to outputs that are not written.
// Outputs. With a tensor map and only rounded, of tiles of at most 64 rows: from registers to memory, where TILE_N is a
// multiple of 64 only of m up to 16. Others through a slab of shared memory a warp; from there by TMA, where TILE_N is
// a multiple of 64 and they have a map.
// Swapped. The rows are columns of the output: A is a layer's weights, B its tokens, whose number may be any multiple of 8
// in a tile. Outputs leave a group's fragments as columns, through a slab of TILE_N rows of 64, by TMA.
// Launch. 32 * WARPS_M threads: the consumers' and the producer's warp, which is a warp group where the consumers need
// registers from it; any grid.x of whole clusters, best the CTAs that run at once.
// Clusters. Of one CTA or two, as the launch says: two run on a pair of multiprocessors, where what both read comes
// faster. SHARES: always two, whose tiles lie beside one another and each of which copies half of A's part of a stage
// for both (SHARED_A), or below one another, and B's (SHARED_B); fewer bytes leave the L2.
// Shared memory. SMEM_BYTES = STAGES * 2 * (TILE_M + TILE_N) * TILE_K + 4 * consumers * SLAB_BYTES + 16 * STAGES + 1024
// (to align the ring): the ring, a slab a consuming warp for the outputs, the mbarriers.
// Macros. OPERAND (F16, BF16); LOAD_A, LOAD_B (K_MAJOR, MN_MAJOR); SHARES (0 to 2); TILE_M (of GROUP_M; 16, 32 where A
// is K_MAJOR), GROUP_M (64, 128), IN_TURN (0; 1 where TILE_M is GROUP_M); TILE_N (a width of ptx/wgmma.cuh; of
// 64 where B is MN_MAJOR); TILE_K (of 64); STAGES; SLAB_BOXES (of 64 columns, that a warp's slab holds, where
// TILE_N is a multiple of 64); STRIDED_OUT (0: no outputs of path OUT_ANY, which leaves out their code); F32_OUT (0; 1:
// binary32 outputs in rows of pairs and no others; STRIDED_OUT is 0); BAND (tile rows; swapped: 1 where there are few columns of tiles);
// CTAS_PER_SM; WARPS_M, WARPS_N (1); SWAPPED (0; 1: the output's map is that of its transpose, STRIDED_OUT is 0, GROUP_M 64,
// IN_TURN 0); SMEM_BYTES; for tests JITTER (Sleep of parts/ring.cuh).
#include "parts/main_loop.cuh"
#include "parts/mma_epilogue.cuh"
#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/producer.cuh"
#include "parts/ring.cuh"
#include "parts/roles.cuh"
#include "parts/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#ifndef SWAPPED
#define SWAPPED 0
#endif
#ifndef F32_OUT
#define F32_OUT 0
#endif
#ifndef JITTER
#define JITTER 0
#endif

constexpr int BLOCKS_M = GROUP_M / 64;  // of 64 rows, of a consumer
constexpr int TURNS = IN_TURN ? 2 : 1;
constexpr int CONSUMERS = (TILE_M + GROUP_M - 1) / GROUP_M * TURNS;
constexpr int CONSUMING_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
using TileA = TmaTile<LOAD_A, TILE_M, TILE_K>;
using TileB = TmaTile<LOAD_B, TILE_N, TILE_K>;
constexpr int CTAS = SHARES == SHARED_NONE ? 1 : 2;  // of a cluster
using StageRing = Ring<TileA, TileB, STAGES, CTAS, Sleep(JITTER)>;
using Position = RingPosition<STAGES>;
using Loop = MainLoop<TileA, TileB, Wgmma16<OPERAND>, BLOCKS_M>;
using Accumulators = Loop::Fragments;  // of 64 rows
using CtaRoles = Roles<CONSUMERS, THREADS, CTAS_PER_SM, 40, CTAS>;
// Of few columns of tokens those that share weights come first.
using Walk = TileWalk<TILE_M, TILE_N, BAND, SHARES, TileA::MN_ROWS ? 8 : 1, SWAPPED ? 1 : 8, SWAPPED ? 8 : 0>;

// Columns of the outputs that pass through shared memory at once: the largest divisor of TILE_N that is a multiple of 8
// and at most `limit`.
DETKERN_INLINE constexpr int slab_columns(int limit) {
  int columns = limit;
  while (columns > 8 && (TILE_N % columns != 0 || columns % 8 != 0)) --columns;
  return columns;
}
// Of 16-bit outputs. BOXED: TMA writes them, from boxes of 16 rows by 64 columns, in rows of 128 bytes swizzled as the
// operands'.
constexpr bool BOXED = TILE_N % ATOM == 0 && !SWAPPED;
constexpr int BOX_BYTES = 16 * ATOM_ROW_BYTES;
constexpr int WORD_SLAB_N = TILE_N < 32 ? TILE_N : 32;
constexpr int WORD_SLAB_PITCH = 2 * WORD_SLAB_N + 16;  // bytes; sixteen more spread most rows over the banks
constexpr int WORD_SLAB_BYTES = BOXED ? SLAB_BOXES * BOX_BYTES : 16 * WORD_SLAB_PITCH;
constexpr int SLAB_N = slab_columns(32);  // of binary32
constexpr int PARTS = TILE_N / SLAB_N;
using WarpOutput = OutputSlab<16, SLAB_N, 4, 0, true>;
constexpr int LARGER_SLAB = WarpOutput::BYTES > WORD_SLAB_BYTES ? WarpOutput::BYTES : WORD_SLAB_BYTES;
constexpr int SWAPPED_SLAB_BYTES = TILE_N * ATOM_ROW_BYTES / 4;  // a quarter of a group's
constexpr int SLAB_BYTES = SWAPPED ? SWAPPED_SLAB_BYTES : BOXED ? (LARGER_SLAB + 1023) / 1024 * 1024 : LARGER_SLAB;

constexpr int GROUP_BARRIER = 3;  // and so on: one a consumer

constexpr int BLOCK_ROWS = TILE_M < 64 ? TILE_M : 64;  // of 64 rows, those that are a tile's
// Whether 16-bit outputs may go from registers to memory. TMA writes boxes of more rows than this faster.
constexpr bool FROM_REGISTERS = TILE_M <= 64 && !SWAPPED;
constexpr int MOST_UNBOXED_ROWS = 16;
// Whether a consumer works out where its next tile lies while the last products of this one are on their way. Groups
// that take turns have time for it anyway. Tiles of few rows are mostly one a CTA; and the main loop of some of them,
// and where TMA writes a tile in more than two parts, would lose its uniform registers.
constexpr bool PLACED_AHEAD = !IN_TURN && TILE_M > 64 && !(BOXED && TILE_N > 2 * SLAB_BOXES * ATOM);

constexpr int SLABS_AT = STAGES * StageRing::STAGE_BYTES;
constexpr int BARRIERS_AT = SLABS_AT + CONSUMING_WARPS * SLAB_BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_M % GROUP_M == 0 || ((TILE_M == 16 || TILE_M == 32) && LOAD_A == K_MAJOR),
              "whole groups or few rows");
static_assert(TILE_M == GROUP_M || !IN_TURN, "a tile is one group's where these take turns");
static_assert(STAGES > 2, "one is multiplied, one is left to be taken, one is left to fill");
static_assert(!F32_OUT || (!STRIDED_OUT && !SWAPPED), "one path");
static_assert(!SWAPPED || (!STRIDED_OUT && GROUP_M == 64 && TILE_M >= 64 && !IN_TURN), "a slab a group");
static_assert(!BOXED || TILE_N % (SLAB_BOXES * ATOM) == 0, "all slabs are full");
static_assert((64 - TILE_M) * ATOM_ROW_BYTES <= TileB::BYTES + CONSUMING_WARPS * SLAB_BYTES,
              "wgmma reads 64 rows of A");
static_assert(SMEM_BYTES == BARRIERS_AT + StageRing::BARRIER_BYTES + 1024, "shared memory");

// Whether this warp's 16 rows of 64 are a tile's. The same in all lanes, and known to be: else the main loop would end
// in a barrier of the warp.
DETKERN_INLINE bool has_rows() {
  return BLOCK_ROWS == 64 || __shfl_sync(~0u, thread_index() / 32, 0) * 16 < BLOCK_ROWS;
}

// A part of 64 rows' accumulators, as wide as a slab.
using SlabFragments = float[SLAB_N / 8][4];
DETKERN_INLINE SlabFragments& slab_part(Accumulators& acc, int part) {
  return reinterpret_cast<SlabFragments&>(acc[part * (SLAB_N / 8)]);
}

// The two outputs of fragment `j` (eight columns each) in row g + 8 * half, rounded.
template <int DTYPE>
DETKERN_INLINE uint32_t word(const Accumulators& acc, int j, int half) {
  return round_pair<DTYPE>(acc[j][2 * half], acc[j][2 * half + 1]);
}

// Writes 16-bit outputs by TMA, from this warp's slab; the last boxes may still be on their way at the return.
template <int DTYPE>
DETKERN_INLINE void store_boxes(const TensorMap& map_out, const OutputTile& tile, BatchIndex batch, uint32_t slab,
                                const Accumulators& acc) {
  const int thread = thread_index(), lane = thread % 32, row = lane % 16;
  const uint32_t target = slab + row * ATOM_ROW_BYTES + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
  for (int first = 0; first < TILE_N / ATOM; first += SLAB_BOXES) {
    if (elected()) store_tensor_wait_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < SLAB_BOXES * ATOM / 8; j += 2) {
      const int column = first * ATOM / 8 + j;
      store_matrices((target ^ j % 8 << 4) + j / 8 * BOX_BYTES, word<DTYPE>(acc, column, 0),
                     word<DTYPE>(acc, column, 1), word<DTYPE>(acc, column + 1, 0), word<DTYPE>(acc, column + 1, 1));
    }
    fence_async_proxy();
    __syncwarp();
    if (has_rows() && elected()) {
#pragma unroll
      for (int box = 0; box < SLAB_BOXES; ++box) {
        store_tensor_box(map_out, tile.column + (first + box) * ATOM, tile.row + thread / 32 % 4 * 16, batch.inner,
                         batch.outer, slab + box * BOX_BYTES);
      }
      store_tensor_commit();
    }
  }
}

// The elements of `out` before those of a batch, where the operands have maps and so at most two batch dimensions.
// batch_offset, for any number, is some 320 instructions.
DETKERN_INLINE int64_t batch_start(const GemmParams& p, BatchIndex batch) {
  return batch.outer * p.out_batch[0] + batch.inner * p.out_batch[1];
}

// Writes 16-bit outputs by 16 bytes a lane, at most WORD_SLAB_N columns at a time, through this warp's slab.
template <int DTYPE>
DETKERN_INLINE void store_words(const GemmParams& p, const OutputTile& tile, BatchIndex batch, uint32_t slab,
                                const Accumulators& acc) {
  const uint32_t lane = thread_index() % 32;
  const uint32_t target = slab + lane % 16 * WORD_SLAB_PITCH + lane / 16 * 16;
  const uint32_t source = slab + lane / 4 * WORD_SLAB_PITCH + lane % 4 * 16;
  const RowPair<8> rows(p, batch_start(p, batch), tile.row, tile.column, TILE_N, has_rows());
#pragma unroll
  for (int first = 0; first < TILE_N; first += WORD_SLAB_N) {
#pragma unroll
    for (int j = first / 8; j < min(first + WORD_SLAB_N, TILE_N) / 8; j += 2) {
      const uint32_t place = target + (j - first / 8) * 16;
      if (j + 1 < TILE_N / 8) {
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

// Writes the 16-bit outputs of a swapped tile's group by TMA, from the group's slab, whose rows are the tile's columns,
// swizzled as boxes are. slab: this warp's quarter, which tells where the group's begins.
template <int DTYPE>
DETKERN_INLINE void store_columns(const TensorMap& map_out, const OutputTile& tile, BatchIndex batch, uint32_t slab,
                                  const Accumulators& acc) {
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
  for (int j = 0; j < TILE_N / 8; j += 2) {
    const uint32_t place = target + j * 8 * ATOM_ROW_BYTES;
    if (j + 1 < TILE_N / 8) {
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
DETKERN_INLINE void store_rounded(const GemmParams& p, const TensorMap& map_out, const OutputTile& tile, BatchIndex batch,
                                  uint32_t slab, const Accumulators& acc) {
  if constexpr (SWAPPED) {
    store_columns<DTYPE>(map_out, tile, batch, slab, acc);
  } else if constexpr (BOXED) {
    store_boxes<DTYPE>(map_out, tile, batch, slab, acc);
  } else {
    store_words<DTYPE>(p, tile, batch, slab, acc);
  }
}

DETKERN_INLINE uint32_t warp_slab(unsigned char* slabs) {
  return shared_address(slabs) + thread_index() / 32 * SLAB_BYTES;
}

// How a tile's outputs are written. What is usual has a loop over tiles of its own, so that its last instructions stand
// right behind the products: those that lie elsewhere are no longer in a cache when a grid has read its operands, and
// each line of them takes as long as memory. The others are apart for the sake of the products' uniform registers.
enum class Outputs {
  ROUNDED,  // of the operands' type, only rounded, with a tensor map and at most one batch dimension
  SIXTEEN,  // any other 16-bit ones with a map: a bias, the other type, or two batch dimensions
  PAIRS,    // binary32 in rows, new or accumulated, without a bias
  ANY,      // any strides
};

DETKERN_INLINE constexpr bool has_map(Outputs outputs) {
  return outputs == Outputs::ROUNDED || outputs == Outputs::SIXTEEN;
}

// Finishes and writes 64 rows of 16-bit outputs with a map, the first of which is tile.row.
DETKERN_INLINE void finish_sixteen(const GemmParams& p, const TensorMap& map_out, const OutputTile& tile, uint32_t slab,
                                   Accumulators& acc) {
  // A chain from +0 never ends at -0, so that the contract's + 0 changes nothing before the rounding.
  if (p.bias_dtype != NONE && SWAPPED) {
    const int64_t row = tile.row + thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4;
    const float bias[2] = {bias_at(p, row, p.m), bias_at(p, row + 8, p.m)};
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) Loop::registers(acc)[i] = __fadd_rn(Loop::registers(acc)[i], bias[i / 2 % 2]);
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
  if (p.out_dtype == F16) {
    store_rounded<F16>(p, map_out, tile, BatchIndex(p, tile.batch), slab, acc);
  } else {
    store_rounded<BF16>(p, map_out, tile, BatchIndex(p, tile.batch), slab, acc);
  }
}

// Calls what(pair, at) for the pairs of 64 rows' binary32 outputs that are the tile's own: `pair` is the first of its two
// registers, `at` its place in memory. The four lanes of a row have one sector of it.
template <typename Acc, typename What>
DETKERN_INLINE void for_each_pair(const GemmParams& p, const OutputTile& tile, const OutputTile& own, Acc& acc,
                                  const What& what) {
  const int thread = thread_index(), lane = thread % 32;
  const int64_t row = tile.row + thread % 128 / 32 * 16 + lane / 4, column = tile.column + lane % 4 * 2;
  // Of this lane's columns, from its first on.
  const int begin = static_cast<int>(own.column - column), end = static_cast<int>(p.n - column);
  float* line = static_cast<float*>(p.out) + batch_start(p, BatchIndex(p, tile.batch)) + row * p.out_row + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool has_row = has_rows() && row + 8 * half >= own.row && row + 8 * half < p.m;
    if (has_row) {
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        if (8 * j < begin || 8 * j >= end) continue;
        what(acc[j] + 2 * half, reinterpret_cast<float2*>(line + 8 * j));
      }
    }
    line += 8 * p.out_row;
  }
}

// Fetches the own ones of 64 rows of outputs that a product starts from.
DETKERN_INLINE void fetch_pairs(const GemmParams& p, const OutputTile& tile, const OutputTile& own, Accumulators& acc) {
  for_each_pair(p, tile, own, acc, [](float* pair, const float2* at) {
    const float2 start = *at;
    pair[0] = start.x;
    pair[1] = start.y;
  });
}

// Finishes and writes 64 rows of binary32 outputs, those from `own` on: an accumulated one must be written once.
DETKERN_INLINE void finish_pairs(const GemmParams& p, const OutputTile& tile, const OutputTile& own,
                                 const Accumulators& acc) {
  for_each_pair(p, tile, own, acc, [](const float* pair, float2* at) {
    *at = make_float2(__fadd_rn(pair[0], 0.0f), __fadd_rn(pair[1], 0.0f));
  });
}

// Finishes and writes 64 rows of any outputs, those from `own` on: an accumulated one must be written once.
DETKERN_INLINE void finish_any(const GemmParams& p, const OutputTile& tile, const OutputTile& own, unsigned char* slabs,
                               const Accumulators& acc) {
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
DETKERN_INLINE void fetch_outputs(const GemmParams& p, OutputTile tile, unsigned char* slabs,
                                  Accumulators (&acc)[BLOCKS_M]) {
#pragma unroll
  for (int block = 0; block < BLOCKS_M; ++block) {
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

// Multiplies and writes the tiles of one consumer.
template <Outputs OUTPUTS>
DETKERN_INLINE void consume(const GemmParams& p, const TensorMap& map_out, const StageRing& ring, unsigned char* slabs,
                            int group, uint32_t blocks) {
  constexpr bool FROM_ZERO = has_map(OUTPUTS);  // the chains; else from what the accumulators hold
  constexpr bool AHEAD = PLACED_AHEAD && FROM_ZERO;
  const int row = IN_TURN ? 0 : group * GROUP_M;
  const uint32_t turn = IN_TURN ? group : 0;
  bool first = true;
  Position position;
  position.advance(turn * blocks);
  Walk walk(p, turn, TURNS);
  // The group's first rows of the walk's tile. By divisions, which would take long once the products are there.
  const auto place = [&] {
    OutputTile rows = walk.output();
    rows.row += row;
    forget(rows.row);
    forget(rows.column);
    return rows;
  };
  OutputTile next;
  if (AHEAD) next = place();
  while (walk.more()) {
    const OutputTile first_rows = AHEAD ? next : place();
    const auto tile_of = [&](int block) {
      OutputTile tile = first_rows;
      tile.row += 64 * block;
      return tile;
    };
    RowPair<2> words;
    if constexpr (OUTPUTS == Outputs::ROUNDED && FROM_REGISTERS) {
      words = RowPair<2>(p, batch_start(p, BatchIndex(first_rows.batch)), first_rows.row, first_rows.column, TILE_N, has_rows());
    }
    Accumulators acc[BLOCKS_M] = {};
    if constexpr (!FROM_ZERO) {
      if (p.accumulate) {
        wait_for_earlier_grid();
        if constexpr (OUTPUTS == Outputs::PAIRS) {
#pragma unroll
          for (int block = 0; block < BLOCKS_M; ++block) fetch_pairs(p, tile_of(block), walk.own(), acc[block]);
        } else {
          fetch_outputs(p, tile_of(0), slabs, acc);
        }
      }
      Loop::hold_all(acc);
    }
    // The phases of a barrier are told apart by their parity alone: a group may wait for its stages only when the other
    // has taken all that come before.
    if (IN_TURN && (group != 0 || !first)) named_barrier<2 * GROUP>(GROUP_BARRIER + group);
    first = false;
    wait_for_earlier_grid();  // as late as can be: what stands before it is done while that grid still ends
    Loop::multiply<FROM_ZERO>(acc, ring, position, row, blocks, [&] {
      if (IN_TURN) named_barrier_arrive<2 * GROUP>(GROUP_BARRIER + (group ^ 1));
      if (!AHEAD) return;
      walk.step();
      if (walk.more()) next = place();
    });
    Loop::hold_all(acc);
    if (IN_TURN) position.advance(blocks);

    if (OUTPUTS == Outputs::ROUNDED && FROM_REGISTERS && (!BOXED || p.m <= MOST_UNBOXED_ROWS)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= words.rows()) break;
#pragma unroll
        for (int j = 0; j < TILE_N / 8; ++j) words.store(half, 8 * j, word<OPERAND>(acc[0], j, half));
      }
    } else {
#pragma unroll
      for (int block = 0; block < BLOCKS_M; ++block) {
        const OutputTile tile = tile_of(block);
        if constexpr (OUTPUTS == Outputs::ROUNDED) {
          store_rounded<OPERAND>(p, map_out, tile, BatchIndex(tile.batch), warp_slab(slabs), acc[block]);
        } else if constexpr (OUTPUTS == Outputs::SIXTEEN) {
          finish_sixteen(p, map_out, tile, warp_slab(slabs), acc[block]);
        } else if constexpr (OUTPUTS == Outputs::PAIRS) {
          finish_pairs(p, tile, walk.own(), acc[block]);
        } else {
          finish_any(p, tile, walk.own(), slabs, acc[block]);
        }
      }
    }
    if (!AHEAD) walk.step();
  }
  if (has_map(OUTPUTS) && (BOXED || SWAPPED) && elected()) store_tensor_wait_read();
}

// Asks the L2 cache for the first of a layer's weights, B or swapped A, that this CTA will read. Its CTAs often start
// while the grid before still ends, and memory is idle then; the cache is coherent, so whatever that grid may yet write
// to the weights is what is read afterwards.
DETKERN_INLINE void prefetch_weights(const GemmParams& p) {
  constexpr bool ALONG_K = (SWAPPED ? LOAD_A : LOAD_B) == K_MAJOR;
  constexpr int EXTENT = SWAPPED ? TILE_M : TILE_N;
  constexpr int ROWS = ALONG_K ? EXTENT : EXTENT / ATOM;  // lines at each k, the lowest k of all first
  const int count = static_cast<int>(p.prefetch_bytes) / (ROWS * ATOM_ROW_BYTES) * ROWS;
  const Walk walk(p);
  // Of rows the walk's own place would cost the main loop its uniform registers. This is it where columns are few.
  const int64_t start = SWAPPED ? int64_t(blockIdx.x / walk.columns()) * TILE_M : walk.output().column;
  const int64_t end = SWAPPED ? p.m : p.n;
  const int64_t across = SWAPPED ? p.a_row : p.b_col, along = SWAPPED ? p.a_col : p.b_row;
  const uint16_t* first = static_cast<const uint16_t*>(SWAPPED ? p.a : p.b) + start * across;
  for (int i = thread_index(); i < count; i += CONSUMING_WARPS * 32) {
    const int k = ALONG_K ? i / ROWS * ATOM : i / ROWS, column = ALONG_K ? i % ROWS : i % ROWS * ATOM;
    if (k < p.k && start + column < end) prefetch_l2(first + k * along + column * across);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ TensorMap map_a,
                   const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_out) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
  const StageRing ring{shared_address(shared), shared_address(shared) + BARRIERS_AT};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, and known to be
  const uint32_t blocks = static_cast<uint32_t>((p.k + TILE_K - 1) / TILE_K);
  if (warp >= CONSUMING_WARPS) {
    if (CtaRoles::begin_producing(warp, ring, CONSUMING_WARPS / TURNS, map_a, map_b)) {
      using Source = MatrixSource<TileA, TileB, TILE_K, SHARES, SWAPPED ? 0 : CTAS == 1 ? 2 : 1>;
      const Walk walk(p);
      produce<TILE_M <= 64, SHARES != SHARED_NONE>(ring, Position(), walk, Source(p, map_a, map_b, walk, blocks));
    }
  } else {
    CtaRoles::claim_registers();
    if (p.batch_rank == 0) prefetch_weights(p);  // without this test the main loop would lose its uniform registers
    CtaRoles::begin_consuming();
    unsigned char* slabs = shared + SLABS_AT;
    const bool mapped = !STRIDED_OUT || p.out_path == OUT_BOXES;
    if constexpr (F32_OUT) {
      consume<Outputs::PAIRS>(p, map_out, ring, slabs, warp / 4, blocks);
    } else if (mapped && p.out_dtype == OPERAND && p.bias_dtype == NONE && p.batch_rank < 2) {
      consume<Outputs::ROUNDED>(p, map_out, ring, slabs, warp / 4, blocks);
    } else if (mapped) {
      consume<Outputs::SIXTEEN>(p, map_out, ring, slabs, warp / 4, blocks);
    } else {
      consume<Outputs::ANY>(p, map_out, ring, slabs, warp / 4, blocks);
    }
  }
}
