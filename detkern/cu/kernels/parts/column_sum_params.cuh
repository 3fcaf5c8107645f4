// The one argument of the kernels that sum columns, and where their rows lie.
#pragma once

#include "parts/elements.cuh"
#include "ptx/types.cuh"

constexpr int MAX_SUM_RANK = 62;  // as DETKERN_MAX_SUM_RANK in abi/abi.h

// column_sum.py packs the same fields in the same order; strides are in elements, of any sign.
struct ColumnSumParams {
  const void* dc;
  void* out;
  int64_t rows;  // of all batch indices together
  int64_t m, n;  // rows of one batch index; columns
  int64_t row_stride, col_stride;
  int64_t out_stride;
  int32_t out_dtype;   // F32, F16 or BF16
  int32_t accumulate;  // 1: the chain starts at out (f32)
  int32_t batch_rank;
  int32_t unused;
  int64_t batch_shape[MAX_SUM_RANK];
  int64_t batch_strides[MAX_SUM_RANK];
};

// The offset of a row in elements.
DETKERN_INLINE int64_t row_offset(const ColumnSumParams& p, int64_t row) {
  if (p.batch_rank == 0) return row * p.row_stride;
  int64_t outer = quotient(row, p.m);
  int64_t offset = (row - outer * p.m) * p.row_stride;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    const int64_t next = quotient(outer, p.batch_shape[axis]);
    offset += (outer - next * p.batch_shape[axis]) * p.batch_strides[axis];
    outer = next;
  }
  return offset;
}
