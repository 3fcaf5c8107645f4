// A kernel of the tests: the largest product of each row with the columns of a tile, by the parts that Hopper's kernels
// are made of, with a walk and an epilogue of its own. A's rows are of groups, one behind another; each has its own B.
//
// Launch. 384 threads; any grid.x. Macros. OPERAND_BYTES (2: bf16, 1: e4m3 and e5m2); SMEM_BYTES.
// Parameters. a_row, m: of A, all groups' rows; b_col, b_batch[0]: of B [groups, n, k]; batch_rank 1; scratch: int32 of
// the groups + 1 rows where they begin and end, in ascending order; out: float [tiles along n][m].
#include "parts/main_loop.cuh"
#include "parts/operand_tile.cuh"
#include "parts/params.cuh"
#include "parts/producer.cuh"
#include "parts/ring.cuh"
#include "parts/roles.cuh"
#include "parts/schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_8bit.cuh"

template <int BYTES>
struct Elements {
  using Products = Wgmma16<BF16>;
};
template <>
struct Elements<1> {
  using Products = Wgmma8<E4M3, E5M2>;
};

constexpr int ROWS = 128, COLUMNS = 192, K = 128 / OPERAND_BYTES, DEPTH = 5;
using TileA = TmaTile<K_MAJOR, ROWS, K, OPERAND_BYTES>;
using TileB = TmaTile<K_MAJOR, COLUMNS, K, OPERAND_BYTES>;
using StageRing = Ring<TileA, TileB, DEPTH>;
using Position = RingPosition<DEPTH>;
using Loop = MainLoop<TileA, TileB, Elements<OPERAND_BYTES>::Products, 1>;
using CtaRoles = Roles<2, 384, 1, 40>;
static_assert(SMEM_BYTES == DEPTH * StageRing::STAGE_BYTES + StageRing::BARRIER_BYTES + 1024, "shared memory");

// The tiles of all groups, one group behind another, column by column; of a CTA every gridDim.x-th.
class GroupWalk {
 public:
  DETKERN_INLINE explicit GroupWalk(const GemmParams& p)
      : p_(p), ends_(static_cast<const int*>(p.scratch)), group_(0), begin_(ends_[0]), tile_(blockIdx.x) {
    settle();
  }

  DETKERN_INLINE bool more() const { return group_ < p_.batch_shape[0]; }

  DETKERN_INLINE void step() {
    tile_ += gridDim.x;
    settle();
  }

  DETKERN_INLINE OutputTile output() const {
    const int high = max(rows_of_group(), 1);
    return {group_, begin_ + static_cast<int64_t>(tile_ % high) * ROWS, static_cast<int64_t>(tile_ / high) * COLUMNS};
  }

  // Of A, where the tile's group ends.
  DETKERN_INLINE int end() const { return ends_[group_ + 1]; }

  DETKERN_INLINE uint32_t rows() const { return static_cast<uint32_t>(p_.m / ROWS + 1); }

 private:
  DETKERN_INLINE int rows_of_group() const { return more() ? (ends_[group_ + 1] - begin_ + ROWS - 1) / ROWS : 0; }

  // Goes on to the group that has the tile.
  DETKERN_INLINE void settle() {
    const int wide = static_cast<int>((p_.n + COLUMNS - 1) / COLUMNS);
    while (more() && tile_ >= rows_of_group() * wide) {
      tile_ -= rows_of_group() * wide;
      begin_ = ends_[++group_];
    }
  }

  const GemmParams& p_;
  const int* ends_;
  int group_, begin_, tile_;
};

DETKERN_INLINE void write_maxima(const GemmParams& p, const OutputTile& tile, int end, const Loop::Fragments& acc) {
  const int lane = threadIdx.x % 32;
  const int64_t first = tile.row + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -__int_as_float(0x7f800000);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (tile.column + 8 * j + lane % 4 * 2 + i < p.n) largest = fmaxf(largest, acc[j][2 * half + i]);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int64_t row = first + 8 * half;
    if (lane % 4 == 0 && row < end) static_cast<float*>(p.out)[tile.column / COLUMNS * p.m + row] = largest;
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    detkern_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ TensorMap map_a,
                   const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_out) {
  extern __shared__ unsigned char unaligned[];
  const uint32_t stages = shared_address(unaligned) + (-shared_address(unaligned) & 1023);
  const StageRing ring{stages, stages + DEPTH * StageRing::STAGE_BYTES};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, and known to be
  const uint32_t blocks = static_cast<uint32_t>((p.k + K - 1) / K);
  if (warp >= CtaRoles::WARPS) {
    if (CtaRoles::begin_producing(warp, ring, CtaRoles::WARPS, map_a, map_b)) {
      wait_for_earlier_grid();  // which may write where the groups end
      const GroupWalk walk(p);
      produce<false, false>(ring, Position(), walk, MatrixSource<TileA, TileB, K>(p, map_a, map_b, walk, blocks));
    }
  } else {
    CtaRoles::claim_registers();
    CtaRoles::begin_consuming();
    wait_for_earlier_grid();
    Position position;
    for (GroupWalk walk(p); walk.more(); walk.step()) {
      Loop::Fragments acc[1] = {};
      Loop::multiply<true>(acc, ring, position, warp / 4 * 64, blocks, [] {});
      Loop::hold_all(acc);
      write_maxima(p, walk.output(), walk.end(), acc[0]);
    }
  }
}
