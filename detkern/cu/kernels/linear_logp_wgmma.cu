// linear_logp (docs/contracts.md) on Hopper (sm_90a), without logits in memory: the products of mma_wgmma.cu, whose
// bits its accumulators have (contract mma16), f16 and bf16, and what linear_logp.cu makes of logits, made of the
// accumulators.
//
// PHASE. FOLD: the states of units of 64 columns, merged where a tile has both of a pair, and the targets' logits;
// MERGE of linear_logp.cu makes the rows' states of them. DELTA: the gradient of the logits, rounded to the operands'
// type. Roles. As mma_wgmma.cu's: warp groups consume, each GROUP_M rows of a tile, all of a tile's together, or
// (IN_TURN) two that have a tile each, so that one folds while the other multiplies. One more warp produces. Tiles. A
// vocabulary's parts, one behind another; the last tile of a part reaches beyond its end, where columns count as -inf
// (FOLD). So no state passes from tile to tile, and they may come in any order. Launch. 32 * WARPS_M threads, a grid of
// the CTAs that run at once (whole clusters), or fewer. Shared memory. SMEM_BYTES = STAGES * 2 * (TILE_M + TILE_N) *
// TILE_K + 16 * STAGES + 1024 (to align the ring): the ring and the mbarriers; DELTA: and 4 * consumers slabs for the
// outputs between them (parts/tile_outputs.cuh). Global memory. FOLD: `nodes`, [parts][part_nodes][2, or 3 with
// entropy][rows] binary32; part_nodes is 2 a tile where TILE_N is 192, else 1. DELTA: none. Macros. PHASE; OPERAND
// (F16, BF16); BIASED, ENTROPY, CAPPED (1: there is a bias, an entropy, a softcap); SHARES (0: none; 2: the CTAs of a
// cluster of two copy B for one another); TILE_M (of GROUP_M; 16, 32); GROUP_M (64, 128); IN_TURN; TILE_N (128, 192,
// 256); TILE_K (of 64); STAGES; SLAB_BOXES; BAND (tile rows); WARPS_M; SMEM_BYTES; for tests JITTER.
#include "parts/logit_tile.cuh"
#include "parts/logp_params.cuh"
#include "parts/main_loop.cuh"
#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/part_walk.cuh"
#include "parts/producer.cuh"
#include "parts/ring.cuh"
#include "parts/roles.cuh"
#include "parts/tile_outputs.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#ifndef JITTER
#define JITTER 0
#endif

enum Phase : int32_t { FOLD = 0, DELTA = 3 };  // linear_logp.cu's

struct FusedParams {
  GemmParams product;  // of hidden [m, k] and weight [n, k]; the output of DELTA
  LogpParams logp;
  PartSizes sizes;
};

constexpr int BLOCKS_M = GROUP_M / 64;  // of 64 rows, of a consumer
constexpr int TURNS = IN_TURN ? 2 : 1;
constexpr int CONSUMERS = (TILE_M + GROUP_M - 1) / GROUP_M * TURNS;
constexpr int CONSUMING_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 32 * WARPS_M;
using TileA = TmaTile<K_MAJOR, TILE_M, TILE_K>;
using TileB = TmaTile<K_MAJOR, TILE_N, TILE_K>;
constexpr int CTAS = SHARES == SHARED_NONE ? 1 : 2;  // of a cluster
using StageRing = Ring<TileA, TileB, STAGES, CTAS, Sleep(JITTER)>;
using Position = RingPosition<STAGES>;
using Loop = MainLoop<TileA, TileB, Wgmma16<OPERAND>, BLOCKS_M>;
using Out = TileOutputs<TILE_M, TILE_N, SLAB_BOXES, false>;
using CtaRoles = Roles<CONSUMERS, THREADS, 1, 40, CTAS>;
using Walk = PartWalk<TILE_M, TILE_N, BAND, SHARES>;
using Block = LogitBlock<TILE_N, BIASED, ENTROPY, CAPPED>;

constexpr int SLABS_AT = STAGES * StageRing::STAGE_BYTES;
constexpr int BARRIERS_AT = SLABS_AT + (PHASE == DELTA ? CONSUMING_WARPS * Out::SLAB_BYTES : 0);
static_assert(OPERAND == F16 || OPERAND == BF16, "mma16 takes 16-bit operands");
static_assert(TILE_M % GROUP_M == 0 || TILE_M == 16 || TILE_M == 32, "whole groups or few rows");
static_assert(TILE_M == GROUP_M || !IN_TURN, "a tile is one group's where these take turns");
static_assert(STAGES > 2, "one is multiplied, one is left to be taken, one is left to fill");
static_assert((64 - TILE_M) * ATOM_ROW_BYTES <= TileB::BYTES, "wgmma reads 64 rows of A");
static_assert(SMEM_BYTES == BARRIERS_AT + StageRing::BARRIER_BYTES + 1024, "shared memory");

// Multiplies the tiles of one consumer and writes what becomes of them.
DETKERN_INLINE void consume(const FusedParams& p, const TensorMap& map_out, const StageRing& ring, unsigned char* slabs,
                            int group, uint32_t blocks) {
  const int row = IN_TURN ? 0 : group * GROUP_M;
  const uint32_t turn = IN_TURN ? group : 0;
  bool first = true;
  Position position;
  position.advance(turn * blocks);
  for (Walk walk(p.sizes, turn, TURNS); walk.more(); walk.step()) {
    Loop::Fragments acc[BLOCKS_M] = {};
    // A group waits for its stages only when the other has taken all that come before: mma_wgmma.cu says why.
    if (IN_TURN && (group != 0 || !first)) named_barrier<2 * GROUP>(GROUP_BARRIER + group);
    first = false;
    wait_for_earlier_grid();
    Loop::multiply<true>(acc, ring, position, row, blocks, [&] {
      if (IN_TURN) named_barrier_arrive<2 * GROUP>(GROUP_BARRIER + (group ^ 1));
    });
    Loop::hold_all(acc);
    if (IN_TURN) position.advance(blocks);
    LogitTile tile = walk.tile();
    tile.row += row;
#pragma unroll
    for (int block = 0; block < BLOCKS_M; ++block, tile.row += 64) {
      if constexpr (PHASE == FOLD) {
        if (Out::has_rows()) Block(p.product, p.logp, tile, acc[block]).fold();
      } else {
        Block(p.product, p.logp, tile, acc[block]).differentiate();
        const OutputTile place = {0, tile.row, tile.column};
        Out::template store_boxes<OPERAND>(map_out, place, BatchIndex(0), Out::warp_slab(slabs), acc[block]);
      }
    }
  }
  if (PHASE == DELTA && elected()) store_tensor_wait_read();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    detkern_kernel(const __grid_constant__ FusedParams p, const __grid_constant__ TensorMap map_a,
                   const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_out) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
  const StageRing ring{shared_address(shared), shared_address(shared) + BARRIERS_AT};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, and known to be
  const uint32_t blocks = static_cast<uint32_t>((p.product.k + TILE_K - 1) / TILE_K);
  if (warp >= CONSUMING_WARPS) {
    if (CtaRoles::begin_producing(warp, ring, CONSUMING_WARPS / TURNS, map_a, map_b)) {
      using Source = MatrixSource<TileA, TileB, TILE_K, SHARES, CTAS == 1 ? 2 : 1>;
      const Walk walk(p.sizes);
      produce<TILE_M <= 64, SHARES != SHARED_NONE>(ring, Position(), walk,
                                                   Source(p.product, map_a, map_b, walk, blocks));
    }
  } else {
    CtaRoles::claim_registers();
    CtaRoles::begin_consuming();
    consume(p, map_out, ring, shared + SLABS_AT, warp / 4, blocks);
  }
}
