// Contracts mma16 and mma8: acc = +0 (or out); for each ascending group of 16 or 8 k acc = step(acc, products), the
// last group padded with zeros. tensor_core.h has the step.
//
// Register tile 2 x 16 (AVX2) or 4 x 32 (AVX-512); k in blocks of 128.
#include "fma_kernel.h"
#include "tensor_core.h"
#include "tiling.h"

namespace detkern {
namespace {

template <class Rules>
struct MmaKernel {
  static constexpr int ROWS = LANES == 16 ? 4 : 2, BLOCK_K = 128;
  static constexpr Limits LIMITS = {ROWS, 192, 256, 1 << 16};

  struct Block : Panels<BLOCK_K, true> {
    int a_smallest, b_smallest;

    void pack(const Job& job, const Tile& tile, int64_t k0, int count) {
      a_smallest = smallest_exponent(job.a.dtype);
      b_smallest = smallest_exponent(job.b.dtype);
      Panels::pack(job, tile, k0, count, Rules::GROUP);
    }
  };

  template <int R>
  static void micro(const Block& block, int row, int panel, int count, float* accumulators) {
    Float acc[R][2];
    load_accumulators(block.starts, accumulators, acc);
    step_chain<Rules, R>(block, row, panel, 0, (count + Rules::GROUP - 1) / Rules::GROUP, block.a_smallest,
                         block.b_smallest, acc);
    store_accumulators(accumulators, acc);
  }
};

}  // namespace

const int MMA_ROWS = MmaKernel<HopperStep>::ROWS;

void run_mma16(const Job& job) { run_chain<MmaKernel<HopperStep>>(job); }
void run_mma8(const Job& job) { run_chain<MmaKernel<AmpereStep>>(job); }

}  // namespace detkern
