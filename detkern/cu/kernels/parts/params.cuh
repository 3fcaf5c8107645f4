// The one argument of every GEMM kernel, passed by value as __grid_constant__. launch.py packs the same fields in
// the same order; strides are in elements of the operand's own type, of any sign, zero where broadcast.
#pragma once

#include "ptx/types.cuh"

constexpr int MAX_BATCH_RANK = 8;

// How an operand's tile comes from global memory.
enum Load : int32_t {
  STRIDED = 0,  // any strides and alignment, element by element
  K_MAJOR = 1,  // k is contiguous; rows start at multiples of 16 bytes
  MN_MAJOR = 2, // m (of A) or n (of B) is contiguous; k rows start at multiples of 16 bytes
};

// Bits of GemmParams::whole_boxes.
enum WholeBoxes : int32_t { WHOLE_A = 1, WHOLE_B = 2 };

// How outputs go to global memory, of the kernels with tensor maps.
enum OutPath : int32_t {
  OUT_ANY = 0,    // any strides and alignment, element by element
  OUT_BOXES = 1,  // a tensor map of the output is given, of 16-bit elements
};

struct GemmParams {
  const void* a;
  const void* b;
  void* out;
  const void* bias;
  void* scratch;
  int64_t m, n, k;
  int64_t a_row, a_col;
  int64_t b_row, b_col;
  int64_t out_row, out_col;
  int64_t bias_stride;
  int64_t prefetch_bytes;  // of B's first tile, that a CTA asks the L2 cache for before it waits for the earlier grid
  int32_t out_dtype;    // F32, F16 or BF16
  int32_t bias_dtype;   // NONE: no bias
  int32_t accumulate;   // 1: the chain starts at out (f32); a tree's root is added to it
  int32_t batch_rank;
  int32_t out_path;     // OutPath
  int32_t whole_boxes;  // of the operands whose tensor maps give all boxes of a tile at once; 0 without maps
  int32_t a_shared;     // how many indices of the batch's second dimension have one matrix of a; 1 without maps
  int32_t b_shared;
  int64_t batch_shape[MAX_BATCH_RANK];  // 1 from batch_rank on
  int64_t a_batch[MAX_BATCH_RANK];
  int64_t b_batch[MAX_BATCH_RANK];
  int64_t out_batch[MAX_BATCH_RANK];
};
