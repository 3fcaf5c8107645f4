// The row operations of docs/contracts.md: sums over the last dimension, each one ascending chain a row, and what is made of
// them.
//
// A task is a block of up to COLUMNS rows of one batch index, worked on in chunks of CHUNK columns. A chain cannot be cut, so
// vector lanes run across rows there: the chunk is transposed into a panel. What is done to each element on its own (exp,
// quotients, gradients) runs along the rows, so that it is as fast for one row as for many.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "exponential.h"
#include "job.h"
#include "packing.h"
#include "simd.h"
#include "threads.h"

namespace detkern {
namespace {

constexpr int CHUNK = 256, PITCH = CHUNK + 16;
constexpr int FEW_ROWS = 4;                   // fewer are added without a panel
constexpr int64_t WORKER_ELEMENTS = 1 << 15;  // elements that are worth another thread

static_assert(CHUNK % LANES == 0 && PITCH % LANES == 0, "rows of a buffer are aligned");

struct Scratch {
  alignas(64) float first[COLUMNS * PITCH];
  alignas(64) float second[COLUMNS * PITCH];
  alignas(64) float panel[CHUNK * COLUMNS + 32];
  alignas(64) float other_panel[CHUNK * COLUMNS + 32];
};

// What is known of each row: its largest element, its finished chain, the one number that its operand is.
struct RowValues {
  alignas(64) float largest[COLUMNS];
  alignas(64) float chain[COLUMNS];
  alignas(64) float given[COLUMNS];
};

struct Block {
  const char *a, *b;
  char* out;
  int rows;
};

Side side_of(const RowOperand& operand) {
  Side side{};
  side.dtype = operand.dtype;
  side.outer_stride = operand.row_stride;
  side.k_stride = operand.col_stride;
  return side;
}

int padded(int count) { return (count + LANES - 1) / LANES * LANES; }

// Columns [first, first + count) of the block's rows, upcast, each row at a multiple of PITCH and followed by zeros.
void load_rows(const RowOperand& operand, const char* data, int rows, int64_t first, int count, float* buffer) {
  pack_rows(side_of(operand), data + first * operand.col_stride, rows, count, padded(count), buffer, PITCH);
}

void load_panel(const RowOperand& operand, const char* data, int rows, int64_t first, int count, float* panel) {
  pack_panels(side_of(operand), data + first * operand.col_stride, rows, count, count, panel, 0);
}

// A buffer of load_rows as a panel.
void turn(const float* buffer, int rows, int count, float* panel) {
  Side side{};
  side.dtype = DETKERN_F32;
  side.outer_stride = PITCH * 4;
  side.k_stride = 4;
  pack_panels(side, reinterpret_cast<const char*>(buffer), rows, count, count, panel, 0);
}

// visit(first column, count) over all chunks, ascending.
template <class Visit>
void each_chunk(int64_t columns, const Visit& visit) {
  for (int64_t first = 0; first < columns; first += CHUNK) visit(first, int(std::min<int64_t>(CHUNK, columns - first)));
}

// ---- chains ---------------------------------------------------------------------------------------------------------

// One more chunk of every row's chain: acc + x, or fma(x, y, acc).
inline void chain_panel(const float* x, int count, float* chain) {
  Float low = load_vector(chain), high = load_vector(chain + LANES);
  for (int k = 0; k < count; ++k) {
    low = low + load_vector(x + k * COLUMNS);
    high = high + load_vector(x + k * COLUMNS + LANES);
  }
  store_vector(chain, low);
  store_vector(chain + LANES, high);
}

inline void chain_panel(const float* x, const float* y, int count, float* chain) {
  Float low = load_vector(chain), high = load_vector(chain + LANES);
  for (int k = 0; k < count; ++k) {
    low = fma(load_vector(x + k * COLUMNS), load_vector(y + k * COLUMNS), low);
    high = fma(load_vector(x + k * COLUMNS + LANES), load_vector(y + k * COLUMNS + LANES), high);
  }
  store_vector(chain, low);
  store_vector(chain + LANES, high);
}

inline float chain_row(const float* x, int count, float acc) {
  for (int k = 0; k < count; ++k) acc += x[k];
  return acc;
}

inline float chain_row(const float* x, const float* y, int count, float acc) {
  for (int k = 0; k < count; ++k) acc = __builtin_fmaf(x[k], y[k], acc);
  return acc;
}

void chain_sum(const RowJob& job, const Block& block, Scratch& scratch, RowValues& values) {
  each_chunk(job.columns, [&](int64_t first, int count) {
    if (block.rows < FEW_ROWS) {
      load_rows(job.a, block.a, block.rows, first, count, scratch.first);
      for (int r = 0; r < block.rows; ++r)
        values.chain[r] = chain_row(scratch.first + r * PITCH, count, values.chain[r]);
    } else {
      load_panel(job.a, block.a, block.rows, first, count, scratch.panel);
      chain_panel(scratch.panel, count, values.chain);
    }
  });
}

// The chain of fma(a, b, acc); of a with itself where there is no b.
void chain_products(const RowJob& job, const Block& block, Scratch& scratch, RowValues& values) {
  const bool two = job.b.data != nullptr;
  each_chunk(job.columns, [&](int64_t first, int count) {
    if (block.rows < FEW_ROWS) {
      load_rows(job.a, block.a, block.rows, first, count, scratch.first);
      if (two) load_rows(job.b, block.b, block.rows, first, count, scratch.second);
      for (int r = 0; r < block.rows; ++r) {
        const float* x = scratch.first + r * PITCH;
        values.chain[r] = chain_row(x, two ? scratch.second + r * PITCH : x, count, values.chain[r]);
      }
    } else {
      load_panel(job.a, block.a, block.rows, first, count, scratch.panel);
      if (two) load_panel(job.b, block.b, block.rows, first, count, scratch.other_panel);
      chain_panel(scratch.panel, two ? scratch.other_panel : scratch.panel, count, values.chain);
    }
  });
}

// The larger of two, or NaN where one is.
inline Float larger(Float a, Float b) { return select((b > a) | (b != b), b, a); }

void find_largest(const RowJob& job, const Block& block, Scratch& scratch, RowValues& values) {
  const float lowest = -std::numeric_limits<float>::infinity();
  std::fill(values.largest, values.largest + COLUMNS, lowest);
  each_chunk(job.columns, [&](int64_t first, int count) {
    load_rows(job.a, block.a, block.rows, first, count, scratch.first);
    for (int r = 0; r < block.rows; ++r) {
      float* row = scratch.first + r * PITCH;
      std::fill(row + count, row + padded(count), lowest);
      Float most = splat(values.largest[r]);
      for (int k = 0; k < count; k += LANES) most = larger(most, load_vector(row + k));
      alignas(64) float lanes[LANES];
      store_vector(lanes, most);
      float found = lanes[0];
      for (int i = 1; i < LANES; ++i) found = lanes[i] > found || lanes[i] != lanes[i] ? lanes[i] : found;
      values.largest[r] = found;
    }
  });
}

// The chain of exp(x - largest).
void chain_exponentials(const RowJob& job, const Block& block, Scratch& scratch, RowValues& values) {
  each_chunk(job.columns, [&](int64_t first, int count) {
    load_rows(job.a, block.a, block.rows, first, count, scratch.first);
    for (int r = 0; r < block.rows; ++r) {
      float* row = scratch.first + r * PITCH;
      const Float largest = splat(values.largest[r]);
      for (int k = 0; k < count; k += LANES) store_vector(row + k, exponential(load_vector(row + k) - largest));
    }
    if (block.rows < FEW_ROWS) {
      for (int r = 0; r < block.rows; ++r)
        values.chain[r] = chain_row(scratch.first + r * PITCH, count, values.chain[r]);
    } else {
      turn(scratch.first, block.rows, count, scratch.panel);
      chain_panel(scratch.panel, count, values.chain);
    }
  });
}

// ---- results --------------------------------------------------------------------------------------------------------

// + 0, NaN canonical, one rounding: `count` results of one row, at `out`. `values` may be read up to a whole vector.
template <int OUT>
void store_row(const float* values, int count, char* out, int64_t stride) {
  int k = 0;
  if (stride == itemsize(OUT))
    for (; k + LANES <= count; k += LANES)
      store_lanes<OUT>(out + k * stride, canonical(load_vector(values + k) + Float{}));
  for (; k < count; ++k) store<OUT>(out + k * stride, canonical(values[k] + 0.0f));
}

void store_block(const RowJob& job, const Block& block, int64_t first, int count, const float* buffer) {
  char* out = block.out + first * job.out.col_stride;
  const auto finish = [&](auto tag) {
    constexpr int OUT = decltype(tag)::value;
    if (job.out.row_stride == itemsize(OUT)) {  // adjacent rows: stores run through adjacent lines
      for (int k = 0; k < count; ++k)
        for (int r = 0; r < block.rows; ++r)
          store<OUT>(out + r * job.out.row_stride + k * job.out.col_stride, canonical(buffer[r * PITCH + k] + 0.0f));
    } else {
      for (int r = 0; r < block.rows; ++r)
        store_row<OUT>(buffer + r * PITCH, count, out + r * job.out.row_stride, job.out.col_stride);
    }
  };
  if (job.out.dtype == DETKERN_F32) return finish(Tag<DETKERN_F32>());
  if (job.out.dtype == DETKERN_F16) return finish(Tag<DETKERN_F16>());
  finish(Tag<DETKERN_BF16>());
}

// out = each(row, a, b) for every element; what a kind does not have is not loaded.
template <class Each>
void map_elements(const RowJob& job, const Block& block, Scratch& scratch, bool loads_a, const Each& each) {
  each_chunk(job.columns, [&](int64_t first, int count) {
    if (loads_a) load_rows(job.a, block.a, block.rows, first, count, scratch.first);
    if (job.b.data) load_rows(job.b, block.b, block.rows, first, count, scratch.second);
    for (int r = 0; r < block.rows; ++r)
      for (int k = 0; k < count; k += LANES) {
        float* at = scratch.first + r * PITCH + k;
        store_vector(at, each(r, loads_a ? load_vector(at) : Float{}, load_vector(scratch.second + r * PITCH + k)));
      }
    store_block(job, block, first, count, scratch.first);
  });
}

void store_chains(const RowJob& job, const Block& block, RowValues& values) {
  RowJob one = job;
  one.out.col_stride = itemsize(job.out.dtype);
  alignas(64) float buffer[LANES] = {};
  for (int r = 0; r < block.rows; ++r) {
    buffer[0] = values.chain[r];
    Block row = block;
    row.out += r * job.out.row_stride;
    row.rows = 1;
    store_block(one, row, 0, 1, buffer);
  }
}

void run_block(const RowJob& job, const Block& block, Scratch& scratch) {
  RowValues values;
  std::fill(values.chain, values.chain + COLUMNS, 0.0f);
  const float width = float(job.columns);
  const auto divide = [&](float* numbers) {
    for (int i = 0; i < COLUMNS; i += LANES) store_vector(numbers + i, load_vector(numbers + i) / splat(width));
  };
  const auto load_given = [&] {
    load_rows(job.a, block.a, block.rows, 0, 1, scratch.first);
    std::fill(values.given, values.given + COLUMNS, 0.0f);
    for (int r = 0; r < block.rows; ++r) values.given[r] = scratch.first[r * PITCH];
  };
  switch (job.kind) {
    case DETKERN_ROW_SUM:
      chain_sum(job, block, scratch, values);
      return store_chains(job, block, values);
    case DETKERN_ROW_MEAN:
      chain_sum(job, block, scratch, values);
      divide(values.chain);
      return store_chains(job, block, values);
    case DETKERN_ROW_MEAN_SQUARE:
      chain_products(job, block, scratch, values);
      divide(values.chain);
      return store_chains(job, block, values);
    case DETKERN_ROW_SOFTMAX:
      find_largest(job, block, scratch, values);
      chain_exponentials(job, block, scratch, values);
      return map_elements(job, block, scratch, true, [&](int r, Float x, Float) {
        return exponential(x - splat(values.largest[r])) / splat(values.chain[r]);
      });
    case DETKERN_ROW_LOG_SOFTMAX:
      find_largest(job, block, scratch, values);
      chain_exponentials(job, block, scratch, values);
      for (int i = 0; i < COLUMNS; i += LANES)
        store_vector(values.chain + i, logarithm(load_vector(values.chain + i)));
      return map_elements(job, block, scratch, true, [&](int r, Float x, Float) {
        return (x - splat(values.largest[r])) - splat(values.chain[r]);
      });
    case DETKERN_ROW_SUM_BACKWARD:
      load_given();
      return map_elements(job, block, scratch, false, [&](int r, Float, Float) { return splat(values.given[r]); });
    case DETKERN_ROW_MEAN_BACKWARD:
      load_given();
      divide(values.given);
      return map_elements(job, block, scratch, false, [&](int r, Float, Float) { return splat(values.given[r]); });
    case DETKERN_ROW_MEAN_SQUARE_BACKWARD:
      load_given();
      divide(values.given);
      return map_elements(job, block, scratch, false, [&](int r, Float, Float x) {
        return (splat(values.given[r]) + splat(values.given[r])) * x;
      });
    case DETKERN_ROW_SOFTMAX_BACKWARD:
      chain_products(job, block, scratch, values);
      return map_elements(job, block, scratch, true,
                          [&](int r, Float dy, Float y) { return y * (dy - splat(values.chain[r])); });
    default:
      chain_sum(job, block, scratch, values);
      return map_elements(job, block, scratch, true, [&](int r, Float dy, Float y) {
        return fma(-exponential(y), splat(values.chain[r]), dy);
      });
  }
}

}  // namespace

void run_rows(const RowJob& job) {
  double elements = double(job.rows) * double(job.columns + 16);
  int64_t batches = 1;
  for (int i = 0; i < job.batch_rank; ++i) batches *= job.batch_shape[i];
  elements *= double(batches);
  const int workers = int(std::min<double>(std::max(job.threads, 1), elements / WORKER_ELEMENTS + 1));
  // Whole panels, but smaller blocks where there are fewer rows than that for each worker.
  const int64_t rows = std::clamp<int64_t>((job.rows * batches + workers - 1) / workers, 1, COLUMNS);
  const int64_t blocks = (job.rows + rows - 1) / rows;
  const std::unique_ptr<Scratch[]> scratches(new Scratch[workers]);
  for_each_task(workers, batches * blocks, [&](int worker, int64_t task) {
    const int64_t first = task % blocks * rows;
    Block block{job.a.data + first * job.a.row_stride, job.b.data ? job.b.data + first * job.b.row_stride : nullptr,
                job.out.data + first * job.out.row_stride, int(std::min(rows, job.rows - first))};
    int64_t outer = task / blocks;
    for (int axis = job.batch_rank - 1; axis >= 0; --axis) {
      const int64_t index = outer % job.batch_shape[axis];
      outer /= job.batch_shape[axis];
      block.a += index * job.a.batch_strides[axis];
      if (block.b) block.b += index * job.b.batch_strides[axis];
      block.out += index * job.out.batch_strides[axis];
    }
    run_block(job, block, scratches[worker]);
  });
}

}  // namespace detkern
