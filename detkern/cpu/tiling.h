// How a call is cut into tiles over (batch, rows, columns), and the loop of a chain over one tile.
//
// A tile is one task. Its k loop runs in blocks: pack the block of both operands, then let every micro tile continue
// its chain from the accumulators in memory. So the order of k is the contract's whatever the cut, and the memory a
// worker needs does not depend on the sizes of the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "epilogue.h"
#include "job.h"
#include "packing.h"
#include "threads.h"

namespace detkern {

constexpr int64_t SCRATCH_LIMIT = 40 << 20;  // bytes, of all workers together

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Cut {
  int rows, columns;  // of a tile, at most; columns is a multiple of COLUMNS, rows of the register tile's
  int64_t row_tiles, column_tiles, batch;
  int workers;

  int64_t tasks() const { return row_tiles * column_tiles * batch; }
};

struct Limits {
  int register_rows;
  int rows, columns;      // the largest tile
  int64_t worker_operations;  // multiply-adds that are worth another thread
};

// bytes(rows, columns) is the scratch memory of one worker.
template <class Bytes>
Cut make_cut(const Job& job, const Limits& limits, const Bytes& bytes) {
  Cut cut{};
  cut.batch = 1;
  for (int d = 0; d < job.batch_rank; ++d) cut.batch *= job.batch_shape[d];
  const double operations = double(job.a.outer) * double(job.b.outer) * double(cut.batch) * double(job.k + 16);
  const double worth = operations / double(limits.worker_operations) + 1;
  cut.workers = int(std::min<double>(std::max(job.threads, 1), worth));
  int rows = limits.rows, columns = limits.columns;
  const auto divide = [&] {
    cut.row_tiles = ceil_div(job.a.outer, rows);
    cut.column_tiles = ceil_div(job.b.outer, columns);
    // Equal tiles rather than a small last one.
    cut.rows = int(ceil_div(ceil_div(job.a.outer, cut.row_tiles), limits.register_rows)) * limits.register_rows;
    cut.columns = int(ceil_div(ceil_div(job.b.outer, cut.column_tiles), COLUMNS)) * COLUMNS;
    cut.row_tiles = ceil_div(job.a.outer, cut.rows);
    cut.column_tiles = ceil_div(job.b.outer, cut.columns);
  };
  divide();
  while (cut.workers > 1 && cut.tasks() < 3 * int64_t(cut.workers) &&
         (cut.rows > limits.register_rows || cut.columns > COLUMNS)) {
    // The larger side of the tile is halved: packing costs rows + columns for rows * columns of work.
    if (cut.columns > COLUMNS && (cut.columns >= cut.rows || cut.rows <= limits.register_rows))
      columns = std::max(COLUMNS, (cut.columns / 2 + COLUMNS - 1) / COLUMNS * COLUMNS);
    else
      rows = std::max(limits.register_rows, cut.rows / 2);
    const int64_t before = cut.tasks();
    divide();
    if (cut.tasks() == before) break;
  }
  cut.workers = int(std::min<int64_t>(cut.workers, cut.tasks()));
  while (cut.workers * int64_t(bytes(cut.rows, cut.columns)) > SCRATCH_LIMIT &&
         (cut.rows > limits.register_rows || cut.columns > COLUMNS)) {
    if (cut.columns > COLUMNS && cut.columns >= cut.rows)
      columns = std::max(COLUMNS, cut.columns / 2 / COLUMNS * COLUMNS);
    else if (cut.rows > limits.register_rows)
      rows = std::max(limits.register_rows, cut.rows / 2);
    else
      columns = std::max(COLUMNS, cut.columns / 2 / COLUMNS * COLUMNS);
    divide();
  }
  return cut;
}

inline Tile tile_of(const Job& job, const Cut& cut, int64_t task) {
  int64_t batch = task / (cut.row_tiles * cut.column_tiles);
  const int64_t rest = task % (cut.row_tiles * cut.column_tiles);
  Tile tile{};
  tile.row = rest % cut.row_tiles * cut.rows;
  tile.column = rest / cut.row_tiles * cut.columns;
  tile.rows = int(std::min<int64_t>(cut.rows, job.a.outer - tile.row));
  tile.columns = int(std::min<int64_t>(cut.columns, job.b.outer - tile.column));
  tile.a = job.a.data + tile.row * job.a.outer_stride;
  tile.b = job.b.data + tile.column * job.b.outer_stride;
  tile.out = job.out + tile.row * job.out_row_stride + tile.column * job.out_col_stride;
  for (int d = job.batch_rank - 1; d >= 0; --d) {
    const int64_t index = batch % job.batch_shape[d];
    batch /= job.batch_shape[d];
    tile.a += index * job.a.batch_strides[d];
    tile.b += index * job.b.batch_strides[d];
    tile.out += index * job.out_batch_strides[d];
  }
  return tile;
}

// Scratch memory of all workers, taken before any work begins so that a failure leaves `out` untouched.
class Scratch {
 public:
  Scratch(int workers, size_t bytes_each)
      : each_((bytes_each + 4095) / 4096 * 4096 + 64), memory_(std::malloc(each_ * size_t(workers) + 64)) {
    if (!memory_) throw std::bad_alloc();
  }
  char* of(int worker) const {
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.get()) + each_ * size_t(worker);
    return reinterpret_cast<char*>((start + 63) / 64 * 64);
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  size_t each_;
  std::unique_ptr<void, Free> memory_;
};

// Calls Kernel::micro<ROWS>(panels, row, panel, count, accumulators) with the number of rows as a constant.
template <class Kernel, int ROWS = Kernel::ROWS>
inline void micro_rows(int rows, const typename Kernel::Block& block, int row, int panel, int count,
                       float* accumulators) {
  if constexpr (ROWS == 1) {
    Kernel::template micro<1>(block, row, panel, count, accumulators);
  } else if (rows >= ROWS) {
    Kernel::template micro<ROWS>(block, row, panel, count, accumulators);
  } else {
    micro_rows<Kernel, ROWS - 1>(rows, block, row, panel, count, accumulators);
  }
}

// All micro tiles of a tile over `count` k of the packed block, from k offset `start` in it.
template <class Kernel>
inline void multiply_block(const Tile& tile, const typename Kernel::Block& block, int count, float* accumulators,
                           int padded_rows) {
  for (int panel = 0; panel * COLUMNS < tile.columns; ++panel)
    for (int row = 0; row < tile.rows; row += Kernel::ROWS)
      micro_rows<Kernel>(std::min(Kernel::ROWS, tile.rows - row), block, row, panel, count,
                         accumulator_row(accumulators, padded_rows, panel, row));
}

// The plain chains: accumulators start at +0 or `out` and run over the whole of K.
template <class Kernel>
void run_chain(const Job& job) {
  const auto bytes = [](int rows, int columns) {
    return size_t(rows) * size_t(columns) * 4 + Kernel::Block::bytes(rows, columns);
  };
  const Cut cut = make_cut(job, Kernel::LIMITS, bytes);
  static_assert(Kernel::LIMITS.rows <= MAX_TILE_SIDE - Kernel::ROWS && Kernel::LIMITS.columns <= MAX_TILE_SIDE);
  const Scratch scratch(cut.workers, bytes(cut.rows, cut.columns));
  for_each_task(cut.workers, cut.tasks(), [&](int worker, int64_t task) {
    const Tile tile = tile_of(job, cut, task);
    float* accumulators = reinterpret_cast<float*>(scratch.of(worker));
    typename Kernel::Block block;
    block.place(reinterpret_cast<char*>(accumulators + size_t(cut.rows) * cut.columns), cut.rows, cut.columns);
    if (job.accumulate) load_out(job, tile, accumulators, cut.rows);
    if (job.k == 0 && !job.accumulate) std::fill_n(accumulators, size_t(cut.rows) * cut.columns, 0.0f);
    for (int64_t k0 = 0; k0 < job.k; k0 += Kernel::BLOCK_K) {
      const int count = int(std::min<int64_t>(Kernel::BLOCK_K, job.k - k0));
      block.pack(job, tile, k0, count);
      block.starts = k0 == 0 && !job.accumulate;
      multiply_block<Kernel>(tile, block, count, accumulators, cut.rows);
    }
    store_tile(job, tile, accumulators, cut.rows);
  });
}

}  // namespace detkern
