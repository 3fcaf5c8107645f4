// The bias gradient: acc = +0 (or out); for rows ascending acc = acc + dc[row, column] in binary32, to nearest even; +
// 0 and one rounding at the end.
//
// A task is up to 1024 columns over all rows, so no chain is ever cut. Its accumulators stay in the first-level cache;
// a group of rows is added to one vector of them before the next. Adjacent columns are read where they lie, 8 rows at a
// time so that the group's lines stream; any others come through packed panels of 64 rows, which transpose where rows
// are adjacent.
#include <algorithm>
#include <cstdint>

#include "job.h"
#include "packing.h"
#include "simd.h"
#include "threads.h"

namespace detkern {
namespace {

constexpr int MAX_COLUMNS = 1024, ROW_GROUP = 8, PANEL_ROWS = 64;
constexpr int64_t WORKER_ELEMENTS = 1 << 17;  // additions that are worth another thread

static_assert(MAX_COLUMNS % COLUMNS == 0, "whole panels");

// Adds ROWS rows of adjacent columns, in order.
template <int DTYPE, int ROWS>
inline void add_adjacent(const char* dc, int64_t row_stride, int columns, float* accumulators) {
  int c = 0;
  for (; c + LANES <= columns; c += LANES) {
    Float acc = load_vector(accumulators + c);
    for (int r = 0; r < ROWS; ++r) acc = acc + load_lanes<DTYPE>(dc + r * row_stride + c * itemsize(DTYPE));
    store_vector(accumulators + c, acc);
  }
  for (; c < columns; ++c)
    for (int r = 0; r < ROWS; ++r) accumulators[c] += load<DTYPE>(dc + r * row_stride + c * itemsize(DTYPE));
}

template <int DTYPE>
void add_rows_adjacent(const SumJob& job, const char* dc, int64_t rows, int columns, float* accumulators) {
  int64_t r = 0;
  for (; r + ROW_GROUP <= rows; r += ROW_GROUP)
    add_adjacent<DTYPE, ROW_GROUP>(dc + r * job.row_stride, job.row_stride, columns, accumulators);
  for (; r < rows; ++r) add_adjacent<DTYPE, 1>(dc + r * job.row_stride, job.row_stride, columns, accumulators);
}

void add_rows_packed(const SumJob& job, const char* dc, int64_t rows, int columns, float* accumulators) {
  Side side{};
  side.dtype = job.dtype;
  side.outer_stride = job.col_stride;
  side.k_stride = job.row_stride;
  alignas(64) float panel[PANEL_ROWS * COLUMNS];
  for (int c0 = 0; c0 < columns; c0 += COLUMNS) {
    const int some = std::min(COLUMNS, columns - c0);
    Float low = load_vector(accumulators + c0), high = load_vector(accumulators + c0 + LANES);
    for (int64_t r0 = 0; r0 < rows; r0 += PANEL_ROWS) {
      const int count = int(std::min<int64_t>(PANEL_ROWS, rows - r0));
      pack_panels(side, dc + r0 * job.row_stride + c0 * job.col_stride, some, count, count, panel, 0);
      for (int r = 0; r < count; ++r) {
        low = low + load_vector(panel + r * COLUMNS);
        high = high + load_vector(panel + r * COLUMNS + LANES);
      }
    }
    store_vector(accumulators + c0, low);
    store_vector(accumulators + c0 + LANES, high);
  }
}

void add_rows(const SumJob& job, const char* dc, int64_t rows, int columns, float* accumulators) {
  if (job.col_stride != itemsize(job.dtype)) return add_rows_packed(job, dc, rows, columns, accumulators);
  switch (job.dtype) {
    case DETKERN_F32: return add_rows_adjacent<DETKERN_F32>(job, dc, rows, columns, accumulators);
    case DETKERN_F16: return add_rows_adjacent<DETKERN_F16>(job, dc, rows, columns, accumulators);
    default: return add_rows_adjacent<DETKERN_BF16>(job, dc, rows, columns, accumulators);
  }
}

void sum_columns(const SumJob& job, int64_t first, int columns) {
  alignas(64) float accumulators[MAX_COLUMNS];
  char* out = job.out + first * job.out_stride;
  std::fill(accumulators, accumulators + (columns + COLUMNS - 1) / COLUMNS * COLUMNS, 0.0f);
  if (job.accumulate)
    for (int c = 0; c < columns; ++c) accumulators[c] = load_raw<float>(out + c * job.out_stride);
  int64_t index[DETKERN_MAX_SUM_RANK] = {};
  const char* dc = job.dc + first * job.col_stride;
  for (;;) {
    add_rows(job, dc, job.rows, columns, accumulators);
    int axis = job.batch_rank - 1;
    for (; axis >= 0; --axis) {
      dc += job.batch_strides[axis];
      if (++index[axis] < job.batch_shape[axis]) break;
      dc -= job.batch_shape[axis] * job.batch_strides[axis];
      index[axis] = 0;
    }
    if (axis < 0) break;
  }
  const auto finish = [&](auto tag) {
    constexpr int OUT = decltype(tag)::value;
    for (int c = 0; c < columns; ++c) store<OUT>(out + c * job.out_stride, canonical(accumulators[c] + 0.0f));
  };
  if (job.out_dtype == DETKERN_F32) return finish(Tag<DETKERN_F32>());
  if (job.out_dtype == DETKERN_F16) return finish(Tag<DETKERN_F16>());
  finish(Tag<DETKERN_BF16>());
}

}  // namespace

void run_column_sum(const SumJob& job) {
  double elements = double(job.columns) * double(job.rows + 16);
  for (int i = 0; i < job.batch_rank; ++i) elements *= double(job.batch_shape[i]);
  const int workers = int(std::min<double>(std::max(job.threads, 1), elements / WORKER_ELEMENTS + 1));
  // Whole panels, and enough tasks for the workers where there are columns enough.
  int64_t columns = (job.columns + workers - 1) / workers;
  columns = std::min<int64_t>((columns + COLUMNS - 1) / COLUMNS * COLUMNS, MAX_COLUMNS);
  const int64_t tasks = (job.columns + columns - 1) / columns;
  for_each_task(workers, tasks, [&](int, int64_t task) {
    sum_columns(job, task * columns, int(std::min(columns, job.columns - task * columns)));
  });
}

}  // namespace detkern
