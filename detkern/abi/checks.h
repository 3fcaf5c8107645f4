// What every library says of a descriptor before it computes: the last error, and the checks that need no device.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "abi.h"

namespace detkern {

inline thread_local char last_error[512];

// Keeps the words for detkern_last_error; returns `status`.
__attribute__((format(printf, 2, 3))) inline int32_t fail(int32_t status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

inline bool is_output_type(int dtype) {
  return dtype == DETKERN_F32 || dtype == DETKERN_F16 || dtype == DETKERN_BF16;
}

// The bit of detkern_capabilities::gemm_offers.
constexpr uint64_t offer(int contract, int dtype) { return uint64_t(1) << (contract * 8 + dtype); }

// DETKERN_OK where detkern_gemm can take the descriptor, all but its pointers; `empty`: there is no output element.
inline int32_t check_gemm_sizes(const detkern_gemm_descriptor* d, uint64_t offers, bool& empty) {
  if (!d || d->size != sizeof *d)
    return fail(DETKERN_INVALID, "gemm descriptor of %llu bytes, this library's has %zu",
                d ? static_cast<unsigned long long>(d->size) : 0ull, sizeof *d);
  if (d->contract < 0 || d->contract > 7 || !(offers >> (d->contract * 8) & 0xff))
    return fail(DETKERN_UNSUPPORTED, "gemm has no contract of code %d", d->contract);
  if (d->operand_dtype < 0 || d->operand_dtype > 7 || !(offers & offer(d->contract, d->operand_dtype)))
    return fail(DETKERN_UNSUPPORTED, "contract %d does not take operands of type %d", d->contract, d->operand_dtype);
  if (!is_output_type(d->out_dtype))
    return fail(DETKERN_UNSUPPORTED, "out_dtype %d is not f32, f16 or bf16", d->out_dtype);
  if (d->bias_dtype && !is_output_type(d->bias_dtype))
    return fail(DETKERN_UNSUPPORTED, "bias_dtype %d is not f32, f16 or bf16", d->bias_dtype);
  if (d->accumulate && d->out_dtype != DETKERN_F32) return fail(DETKERN_INVALID, "accumulate needs an f32 out");
  if (d->accumulate && d->bias_dtype) return fail(DETKERN_INVALID, "accumulate and bias exclude each other");
  if (d->m < 0 || d->n < 0 || d->k < 0) return fail(DETKERN_INVALID, "negative m, n or k");
  if (d->batch_rank < 0 || d->batch_rank > DETKERN_MAX_BATCH_RANK)
    return fail(DETKERN_INVALID, "batch_rank %d is not in 0..%d", d->batch_rank, DETKERN_MAX_BATCH_RANK);
  empty = d->m == 0 || d->n == 0;
  for (int i = 0; i < d->batch_rank; ++i) {
    if (d->batch_shape[i] < 0) return fail(DETKERN_INVALID, "negative batch_shape");
    empty |= d->batch_shape[i] == 0;
  }
  return DETKERN_OK;
}

// The same with the pointers.
inline int32_t check_gemm(const detkern_gemm_descriptor* d, uint64_t offers, bool& empty) {
  if (const int32_t status = check_gemm_sizes(d, offers, empty)) return status;
  if (!empty && (!d->out || (d->k && (!d->a || !d->b)) || (d->bias_dtype && !d->bias)))
    return fail(DETKERN_INVALID, "a null pointer where elements are");
  return DETKERN_OK;
}

// DETKERN_OK where detkern_column_sum can take the descriptor; `rows`: those of one batch index, 0 where there are none
// at all.
inline int32_t check_column_sum(const detkern_column_sum_descriptor* d, int64_t& rows) {
  if (!d || d->size != sizeof *d)
    return fail(DETKERN_INVALID, "column-sum descriptor of %llu bytes, this library's has %zu",
                d ? static_cast<unsigned long long>(d->size) : 0ull, sizeof *d);
  if (!is_output_type(d->operand_dtype))
    return fail(DETKERN_UNSUPPORTED, "operand_dtype %d is not f32, f16 or bf16", d->operand_dtype);
  if (!is_output_type(d->out_dtype))
    return fail(DETKERN_UNSUPPORTED, "out_dtype %d is not f32, f16 or bf16", d->out_dtype);
  if (d->accumulate && d->out_dtype != DETKERN_F32) return fail(DETKERN_INVALID, "accumulate needs an f32 out");
  if (d->m < 0 || d->n < 0) return fail(DETKERN_INVALID, "negative m or n");
  if (d->batch_rank < 0 || d->batch_rank > DETKERN_MAX_SUM_RANK)
    return fail(DETKERN_INVALID, "batch_rank %d is not in 0..%d", d->batch_rank, DETKERN_MAX_SUM_RANK);
  rows = d->m;
  for (int i = 0; i < d->batch_rank; ++i) {
    if (d->batch_shape[i] < 0) return fail(DETKERN_INVALID, "negative batch_shape");
    if (d->batch_shape[i] == 0) rows = 0;
  }
  if (d->n && (!d->out || (rows && !d->dc))) return fail(DETKERN_INVALID, "a null pointer where elements are");
  return DETKERN_OK;
}

}  // namespace detkern
