// Contract fma: acc = +0 (or out); for k ascending acc = fma(a[k], b[k], acc) in binary32, to nearest even.
//
// Register tile 6 x 16 (AVX2) or 14 x 32 (AVX-512); k in blocks of 256, between which accumulators rest in memory.
#include "fma_kernel.h"
#include "tiling.h"

namespace detkern {
namespace {

struct FmaKernel {
  static constexpr int ROWS = FMA_TILE_ROWS, BLOCK_K = 256;
  static constexpr Limits LIMITS = {ROWS, 348, 512, 1 << 19};

  struct Block : Panels<BLOCK_K, false> {
    void pack(const Job& job, const Tile& tile, int64_t k0, int count) { Panels::pack(job, tile, k0, count, 1); }
  };

  template <int R>
  static void micro(const Block& block, int row, int panel, int count, float* accumulators) {
    Float acc[R][2];
    load_accumulators(block.starts, accumulators, acc);
    fma_chain<R>(block, row, panel, 0, count, acc);
    store_accumulators(accumulators, acc);
  }
};

}  // namespace

const int FMA_ROWS = FmaKernel::ROWS, TILE_COLUMNS = COLUMNS;

void run_fma(const Job& job) { run_chain<FmaKernel>(job); }

}  // namespace detkern
