// Contracts tree and tree-mma16: leaves of 32 k, each a chain from +0 rounded once to the operand type; the node of
// leaves [lo, hi) splits at lo + (hi - lo) // 2 and is left + right in binary32, rounded to the operand type.
//
// Register tiles as in fma.cpp and mma.cpp. Leaves come in ascending order, so k is packed in blocks of eight leaves as
// in a chain, and only one value per level of the tree is alive: any K fits, in a tile of 96 x 128 for each level.
#include "fma_kernel.h"
#include "tensor_core.h"
#include "tiling.h"

namespace detkern {
namespace {

constexpr int LEAF = 32;

struct FmaLeaf {
  static constexpr int ROWS = FMA_TILE_ROWS, BLOCK_K = 256, GROUP = 1;
  static constexpr Limits LIMITS = {ROWS, LANES == 16 ? 98 : 96, 128, 1 << 19};
  using Packed = Panels<BLOCK_K, false>;

  template <int R>
  static void leaf(const Packed& block, int, int row, int panel, int first_k, int count, Float (&acc)[R][2]) {
    fma_chain<R>(block, row, panel, first_k, count, acc);
  }
};

struct MmaLeaf {
  static constexpr int ROWS = LANES == 16 ? 4 : 2, BLOCK_K = 128, GROUP = 16;
  static constexpr Limits LIMITS = {ROWS, 96, 128, 1 << 16};
  using Packed = Panels<BLOCK_K, true>;

  template <int R>
  static void leaf(const Packed& block, int smallest, int row, int panel, int first_k, int count, Float (&acc)[R][2]) {
    step_chain<HopperStep, R>(block, row, panel, first_k, (count + GROUP - 1) / GROUP, smallest, smallest, acc);
  }
};

template <class Leaf>
struct TreeKernel {
  static constexpr int ROWS = Leaf::ROWS;

  struct Block : Leaf::Packed {
    int dtype, smallest, first_k;
  };

  template <int R>
  static void micro(const Block& block, int row, int panel, int count, float* values) {
    Float acc[R][2] = {};
    Leaf::template leaf<R>(block, block.smallest, row, panel, block.first_k, count, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v)
        acc[r][v] = block.dtype == DETKERN_F16 ? round_to_f16(acc[r][v]) : round_to_bf16(acc[r][v]);
    store_accumulators(values, acc);
  }
};

// left = left + right in binary32, rounded to the operand type.
void merge(float* left, const float* right, size_t size, int dtype) {
  if (dtype == DETKERN_F16)
    for (size_t i = 0; i < size; i += LANES)
      store_vector(left + i, round_to_f16(load_vector(left + i) + load_vector(right + i)));
  else
    for (size_t i = 0; i < size; i += LANES)
      store_vector(left + i, round_to_bf16(load_vector(left + i) + load_vector(right + i)));
}

int depth_of(int64_t leaves) {
  int depth = 1;
  for (; leaves > 1; leaves -= leaves / 2) ++depth;
  return depth;
}

template <class Leaf>
void run(const Job& job) {
  using Kernel = TreeKernel<Leaf>;
  const int64_t leaves = ceil_div(job.k, LEAF);
  const int depth = depth_of(leaves);
  const auto bytes = [depth](int rows, int columns) {
    return size_t(depth) * size_t(rows) * size_t(columns) * 4 + Kernel::Block::bytes(rows, columns);
  };
  const Cut cut = make_cut(job, Leaf::LIMITS, bytes);
  const size_t size = size_t(cut.rows) * cut.columns;
  const Scratch scratch(cut.workers, bytes(cut.rows, cut.columns));

  // One tile: node() leaves the value of the leaves [lo, hi) in level `level`.
  struct Walk {
    const Job& job;
    const Tile& tile;
    float* levels;
    size_t size;
    int padded_rows;
    typename Kernel::Block block;
    int64_t packed_until;

    void node(int64_t lo, int64_t hi, int level) {
      float* value = levels + size_t(level) * size;
      if (hi - lo == 1) {
        const int64_t k0 = lo * LEAF;
        if (k0 >= packed_until) {
          const int count = int(std::min<int64_t>(Leaf::BLOCK_K, job.k - k0));
          block.pack(job, tile, k0, count, Leaf::GROUP);
          packed_until = k0 + count;
        }
        block.first_k = int(k0 % Leaf::BLOCK_K);
        multiply_block<Kernel>(tile, block, int(std::min<int64_t>(LEAF, job.k - k0)), value, padded_rows);
        return;
      }
      const int64_t middle = lo + (hi - lo) / 2;
      node(lo, middle, level);
      node(middle, hi, level + 1);
      merge(value, value + size, size, block.dtype);
    }
  };

  for_each_task(cut.workers, cut.tasks(), [&](int worker, int64_t task) {
    const Tile tile = tile_of(job, cut, task);
    Walk walk{job, tile, reinterpret_cast<float*>(scratch.of(worker)), size, cut.rows, {}, 0};
    walk.block.place(reinterpret_cast<char*>(walk.levels + size_t(depth) * size), cut.rows, cut.columns);
    walk.block.dtype = job.a.dtype;
    walk.block.smallest = smallest_exponent(job.a.dtype);
    // Rows past the edge of a tile are never written, but are added and rounded with the rest.
    std::fill_n(walk.levels, size_t(depth) * size, 0.0f);
    if (leaves > 0) walk.node(0, leaves, 0);
    if (job.accumulate) add_out(job, tile, walk.levels, cut.rows);
    store_tile(job, tile, walk.levels, cut.rows);
  });
}

}  // namespace

void run_tree(const Job& job) { run<FmaLeaf>(job); }
void run_tree_mma16(const Job& job) { run<MmaLeaf>(job); }

}  // namespace detkern
