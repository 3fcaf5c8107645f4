// Contract mma16 (wgmma m64nNk16, sm_90a only), f16 and bf16: each output one chain of tensor-core steps of 16 k,
// ascending, from +0 or from the output. The bits are mma.cu's.
//
// Roles. Warp groups consume, each GROUP_M rows of a tile. All of a tile's groups work on it together, or (IN_TURN) two
// groups have a tile each, so that one finishes and writes its outputs while the other multiplies. One more warp
// produces: one thread of it fills a ring of STAGES stages by TMA (parts/ring.cuh) and runs ahead into the next tile.
// Few rows. A tile of 16 or 32 rows has no more in a stage; wgmma reads 64, and what it finds in the others' place,
// which may be changing, goes to outputs that are not written.
// Outputs. With a tensor map and only rounded, of tiles of at most 64 rows: from registers to memory, where TILE_N is a
// multiple of 64 only of m up to 16. Of 16 bits along rows without a map: from registers, too. Others through a slab of
// shared memory a warp; from there by TMA, where TILE_N is a multiple of 64 and they have a map.
// Swapped. The rows are columns of the output: A is a layer's weights, B its tokens, whose number may be any multiple
// of 8 in a tile. Outputs leave a group's fragments as columns, through a slab of TILE_N rows of 64, by TMA.
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
// TILE_N is a multiple of 64); REST_N (0; where B is MN_MAJOR, columns behind the last whole 64, of 16: boxes of map_b
// have so many where there is no whole one, else those of map_out, which is of B then, since such outputs need none);
// STRIDED_OUT (0: no outputs of path OUT_ANY, which leaves out their code); F32_OUT (0; 1: binary32 outputs in rows,
// written by 16 bytes, and no others; STRIDED_OUT is 0); BAND (tile rows; swapped: 1 where there are few columns of
// tiles); CTAS_PER_SM; WARPS_M, WARPS_N (1); SWAPPED (0; 1: the output's map is that of its transpose, STRIDED_OUT is
// 0, GROUP_M 64, IN_TURN 0); SMEM_BYTES; for tests JITTER (Sleep of parts/ring.cuh).
#include "parts/main_loop.cuh"
#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/producer.cuh"
#include "parts/ring.cuh"
#include "parts/roles.cuh"
#include "parts/tile_outputs.cuh"
#include "parts/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
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
#ifndef REST_N
#define REST_N 0
#endif
#ifndef START_AHEAD
#define START_AHEAD 0
#endif
#ifndef OUT_HINT
#define OUT_HINT 0
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
using Out = TileOutputs<TILE_M, TILE_N, SLAB_BOXES, SWAPPED>;
using CtaRoles = Roles<CONSUMERS, THREADS, CTAS_PER_SM, 40, CTAS>;
// Of few columns of tokens those that share weights come first.
using Walk = TileWalk<TILE_M, TILE_N, BAND, SHARES, TileA::MN_ROWS ? 8 : 1, SWAPPED && !TileB::MN_ROWS ? 1 : 8,
                      SWAPPED ? 8 : 0>;

// Whether 16-bit outputs may go from registers to memory. TMA writes boxes of more rows than this faster.
constexpr bool FROM_REGISTERS = TILE_M <= 64 && !SWAPPED;
constexpr int MOST_UNBOXED_ROWS = 16;
// Whether a consumer works out where its next tile lies while the last products of this one are on their way. Groups
// that take turns have time for it anyway. Tiles of few rows are mostly one a CTA; and the main loop of some of them,
// and where TMA writes a tile in more than two parts, would lose its uniform registers.
constexpr bool PLACED_AHEAD = !IN_TURN && TILE_M > 64 && !(Out::BOXED && TILE_N > 2 * SLAB_BOXES * ATOM);

constexpr int SLABS_AT = STAGES * StageRing::STAGE_BYTES;
constexpr int BARRIERS_AT = SLABS_AT + CONSUMING_WARPS * Out::SLAB_BYTES;
static_assert(OPERAND == F16 || OPERAND == BF16, "the tensor-core contracts take 16-bit operands");
static_assert(TILE_M % GROUP_M == 0 || ((TILE_M == 16 || TILE_M == 32) && LOAD_A == K_MAJOR),
              "whole groups or few rows");
static_assert(TILE_M == GROUP_M || !IN_TURN, "a tile is one group's where these take turns");
static_assert(STAGES > 2, "one is multiplied, one is left to be taken, one is left to fill");
static_assert(!F32_OUT || (!STRIDED_OUT && !SWAPPED), "one path");
static_assert(!SWAPPED || (!STRIDED_OUT && GROUP_M == 64 && TILE_M >= 64 && !IN_TURN), "a slab a group");
static_assert((64 - TILE_M) * ATOM_ROW_BYTES <= TileB::BYTES + CONSUMING_WARPS * Out::SLAB_BYTES,
              "wgmma reads 64 rows of A");
static_assert(TileB::REST == REST_N && (TileB::REST == 0 || TileB::BOXES == 0 || (!STRIDED_OUT && !SWAPPED)),
              "map_out is B's or the output's");
static_assert(SMEM_BYTES == BARRIERS_AT + StageRing::BARRIER_BYTES + 1024, "shared memory");

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
  // Outputs that the first chains start from are asked for while the earlier grid still runs. Those of the next tiles
  // are not: where memory is the limit, what is asked for a tile ahead has left the L2 cache when it is needed.
  const auto prefetch_start = [&](Walk of) {
    if (OUTPUTS != Outputs::QUADS || !p.accumulate || !of.more()) return;
    OutputTile tile = of.output();
    tile.row += row;
#pragma unroll 1
    for (int block = 0; block < BLOCKS_M; ++block, tile.row += 64) Out::prefetch_quads(p, tile);
  };
  prefetch_start(walk);
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
      const int64_t batch = Out::batch_start(p, BatchIndex(first_rows.batch));
      words = RowPair<2>(p, batch, first_rows.row, first_rows.column, TILE_N, Out::has_rows());
    }
    Loop::Fragments acc[BLOCKS_M] = {};
    if constexpr (!FROM_ZERO) {
      if (p.accumulate) {
        wait_for_earlier_grid();
        if constexpr (OUTPUTS == Outputs::QUADS) {
#pragma unroll
          for (int block = 0; block < BLOCKS_M; ++block) Out::fetch_quads(p, tile_of(block), walk.own(), acc[block]);
          if (START_AHEAD == 1) {
            Walk after = walk;
            after.step();
            prefetch_start(after);
          }
        } else {
          Out::fetch_outputs(p, tile_of(0), slabs, acc);
        }
      }
      Loop::hold_all(acc);
    }
    // The phases of a barrier are told apart by their parity alone: a group may wait for its stages only when the
    // other has taken all that come before.
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

    if (OUTPUTS == Outputs::ROUNDED && FROM_REGISTERS && (!Out::BOXED || p.m <= MOST_UNBOXED_ROWS)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= words.rows()) break;
#pragma unroll
        for (int j = 0; j < TILE_N / 8; ++j) words.store(half, 8 * j, Out::word<OPERAND>(acc[0], j, half));
      }
    } else {
      if (START_AHEAD == 2 && OUTPUTS == Outputs::QUADS) {
        Walk after = walk;
        after.step();
        prefetch_start(after);
      }
#pragma unroll
      for (int block = 0; block < BLOCKS_M; ++block) {
        const OutputTile tile = tile_of(block);
        if constexpr (OUTPUTS == Outputs::ROUNDED) {
          Out::store_rounded<OPERAND>(p, map_out, tile, BatchIndex(tile.batch), Out::warp_slab(slabs), acc[block]);
        } else if constexpr (OUTPUTS == Outputs::SIXTEEN) {
          Out::finish_sixteen(p, map_out, tile, Out::warp_slab(slabs), acc[block]);
        } else if constexpr (OUTPUTS == Outputs::QUADS) {
          Out::template finish_quads<OUT_HINT>(p, tile, walk.own(), acc[block]);
        } else if (Out::along_rows(p)) {
          Out::finish_rows(p, tile, acc[block]);
        } else {
          Out::finish_any(p, tile, walk.own(), slabs, acc[block]);
        }
      }
    }
    if (!AHEAD) walk.step();
  }
  if (has_map(OUTPUTS) && (Out::BOXED || SWAPPED) && elected()) store_tensor_wait_read();
}

// Asks the L2 cache for the first of a layer's weights, B or swapped A, that this CTA will read. Its CTAs often start
// while the grid before still ends, and memory is idle then; the cache is coherent, so whatever that grid may yet
// write to the weights is what is read afterwards.
DETKERN_INLINE void prefetch_weights(const GemmParams& p) {
  constexpr bool ALONG_K = (SWAPPED ? LOAD_A : LOAD_B) == K_MAJOR;
  constexpr int EXTENT = SWAPPED ? TILE_M : TILE_N;
  constexpr int ROWS = ALONG_K ? EXTENT : (EXTENT + ATOM - 1) / ATOM;  // lines at each k, the lowest k of all first
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
    using Source = MatrixSource<TileA, TileB, TILE_K, SHARES, SWAPPED ? 0 : CTAS == 1 ? 2 : 1, SHARES == SHARED_NONE>;
    if (warp == CONSUMING_WARPS) Source::clear_for_few(p, ring, Walk(p));
    if (CtaRoles::begin_producing(warp, ring, CONSUMING_WARPS / TURNS, map_a, map_b)) {
      const Walk walk(p);
      const TensorMap& map_rest = TileB::BOXES == 0 ? map_b : map_out;
      produce<TILE_M <= 64, SHARES != SHARED_NONE>(ring, Position(), walk,
                                                   Source(p, map_a, map_b, walk, blocks, &map_rest));
    }
  } else {
    CtaRoles::claim_registers();
    if (p.batch_rank == 0) prefetch_weights(p);  // without this test the main loop would lose its uniform registers
    CtaRoles::begin_consuming();
    unsigned char* slabs = shared + SLABS_AT;
    const bool mapped = !STRIDED_OUT || p.out_path == OUT_BOXES;
    if constexpr (F32_OUT) {
      consume<Outputs::QUADS>(p, map_out, ring, slabs, warp / 4, blocks);
    } else if (mapped && p.out_dtype == OPERAND && p.bias_dtype == NONE && p.batch_rank < 2) {
      consume<Outputs::ROUNDED>(p, map_out, ring, slabs, warp / 4, blocks);
    } else if (mapped) {
      consume<Outputs::SIXTEEN>(p, map_out, ring, slabs, warp / 4, blocks);
    } else {
      consume<Outputs::ANY>(p, map_out, ring, slabs, warp / 4, blocks);
    }
  }
}
