// One call, in the form that every kernel takes: two stacks of vectors along k, multiplied all with all.
#pragma once

#include <cstdint>

#include "../abi/abi.h"
#include "floats.h"

namespace detkern {

// The rows of A, or the columns of B: `outer` of them. Strides are in bytes.
struct Side {
  const char* data;
  int dtype;
  int64_t outer, outer_stride, k_stride;
  int64_t batch_strides[DETKERN_MAX_BATCH_RANK];
  // fp8-block128 alone: one f32 for each 128 k.
  const char* scale;
  int64_t scale_outer_stride, scale_block_stride;
};

struct Bias {
  const char* data;  // null: none
  int dtype;
  int64_t stride;
  bool along_rows;  // one value for each row of the tile instead of each column
};

// out[batch, i, j] = contract(a[batch, i, :], b[batch, j, :]). Every contract is symmetric in its two operands, so a
// side too thin to fill the vector lanes that run along j is exchanged with the other.
struct Job {
  Side a, b;
  int64_t k;
  int batch_rank;
  int64_t batch_shape[DETKERN_MAX_BATCH_RANK];
  char* out;
  int out_dtype;
  int64_t out_row_stride, out_col_stride;
  int64_t out_batch_strides[DETKERN_MAX_BATCH_RANK];
  Bias bias;
  bool accumulate;
  int threads;
};

constexpr int MAX_TILE_SIDE = 512;  // rows, or columns, of the largest tile

// A tile of one output matrix. `a`, `b` and `out` point at its first row, column and element.
struct Tile {
  int64_t row, column;
  int rows, columns;
  const char *a, *b;
  char* out;
};

// out[j] = the chain of additions over the rows dc[batch, i, j]. Strides are in bytes.
struct SumJob {
  const char* dc;
  int dtype;
  int64_t rows, columns, row_stride, col_stride;  // rows: of one batch index
  int batch_rank;
  const int64_t* batch_shape;
  int64_t batch_strides[DETKERN_MAX_SUM_RANK];
  char* out;
  int out_dtype;
  int64_t out_stride;
  bool accumulate;
  int threads;
};

// One operand of a row operation. Strides are in bytes; one number a row has column stride 0.
struct RowOperand {
  char* data;  // null: there is none
  int dtype;
  int64_t row_stride, col_stride;
  int64_t batch_strides[DETKERN_MAX_SUM_RANK];
};

// out[batch, i, :] = the operation on a[batch, i, :] and b[batch, i, :].
struct RowJob {
  int kind;                // detkern_row_kind
  int64_t rows, columns;  // rows: of one batch index
  int batch_rank;
  const int64_t* batch_shape;
  RowOperand a, b, out;
  int threads;
};

// Numbers of rows, float32, a line of one for each row. Strides are in bytes.
struct Lines {
  char* data;
  int64_t line_stride, row_stride;
};

// Logits, folded into states or turned into their gradient. Strides are in bytes.
struct LogpJob {
  Job product;  // of hidden and weight, with the bias; its out is a block of logits
  void (*multiply)(const Job&);
  int threads;
  int64_t vocabulary, start;  // start: of weight's rows in the vocabulary
  const char* target;
  bool wide_targets;  // int64, else int32
  int64_t target_row_stride, target_col_stride;
  int targets;  // of a row
  int64_t ignore_index;
  bool entropy;
  float tau, cap, inverse;  // 0: there is no such step
  Lines state;              // the result of a fold
  Lines grads;              // of a gradient alone, as what follows
  char* out;
  int out_dtype;
  int64_t out_row_stride, out_col_stride;
};

// Each implements one contract, or two that share a loop; they throw std::bad_alloc before `out` is touched.
void run_fma(const Job& job);
void run_mma16(const Job& job);
void run_mma8(const Job& job);
void run_tree(const Job& job);
void run_tree_mma16(const Job& job);
void run_fp8_block128(const Job& job);
void run_column_sum(const SumJob& job);
void run_rows(const RowJob& job);
// Their products take memory of their own, block by block: what they throw may find the results of earlier rows in
// `out`.
void run_logp_fold(const LogpJob& job);
void run_logp_delta(const LogpJob& job);
void run_prefix_sums(const RowJob& job);  // the two kinds of it

// The register tile, rows times columns, of the chains of fused multiply-adds and of the tensor-core steps.
extern const int FMA_ROWS, MMA_ROWS, TILE_COLUMNS;

}  // namespace detkern
