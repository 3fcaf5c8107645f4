// Contract fp8-block128: each block of 128 k is four tensor-core steps of 32 from +0 (14 significant bits);
// s = scale_a * scale_b in binary32; acc = fma(s, block, acc), blocks ascending from +0 (or out).
//
// Register tile 2 x 16 (AVX2) or 4 x 32 (AVX-512); one block of k is packed at a time, with its scales.
#include "fma_kernel.h"
#include "tensor_core.h"
#include "tiling.h"

namespace detkern {
namespace {

struct Fp8Kernel {
  static constexpr int ROWS = LANES == 16 ? 4 : 2, BLOCK_K = 128;
  static constexpr int TILE_ROWS = 192, TILE_COLUMNS_MOST = 256;
  static constexpr Limits LIMITS = {ROWS, TILE_ROWS, TILE_COLUMNS_MOST, 1 << 16};

  struct Block : Panels<BLOCK_K, true> {
    int a_smallest, b_smallest;
    float a_scale[TILE_ROWS];
    alignas(64) float b_scale[TILE_COLUMNS_MOST] = {};

    void pack(const Job& job, const Tile& tile, int64_t k0, int count) {
      a_smallest = smallest_exponent(job.a.dtype);
      b_smallest = smallest_exponent(job.b.dtype);
      Panels::pack(job, tile, k0, count, HopperFp8Step::GROUP);
      const int64_t block = k0 / BLOCK_K;
      for (int r = 0; r < tile.rows; ++r)
        a_scale[r] = load_raw<float>(job.a.scale + (tile.row + r) * job.a.scale_outer_stride +
                                     block * job.a.scale_block_stride);
      for (int c = 0; c < tile.columns; ++c)
        b_scale[c] = load_raw<float>(job.b.scale + (tile.column + c) * job.b.scale_outer_stride +
                                     block * job.b.scale_block_stride);
    }
  };

  template <int R>
  static void micro(const Block& block, int row, int panel, int count, float* accumulators) {
    Float sum[R][2] = {}, acc[R][2];
    step_chain<HopperFp8Step, R>(block, row, panel, 0, count / HopperFp8Step::GROUP, block.a_smallest, block.b_smallest,
                                 sum);
    load_accumulators(block.starts, accumulators, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) {
        const Float scale = splat(block.a_scale[row + r]) * load_vector(block.b_scale + panel * COLUMNS + v * LANES);
        acc[r][v] = fma(scale, sum[r][v], acc[r][v]);
      }
    store_accumulators(accumulators, acc);
  }
};

}  // namespace

void run_fp8_block128(const Job& job) { run_chain<Fp8Kernel>(job); }

}  // namespace detkern
