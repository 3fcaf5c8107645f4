// What every library does with a descriptor before it computes: the last error, structs of older and newer callers, the
// checks that need no device.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

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

// The least size of a struct: what it had in version 3 of the ABI, up to `last`.
template <class D>
struct FirstSize;
#define DETKERN_FIRST_SIZE(type, last)                                           \
  template <>                                                                    \
  struct FirstSize<type> {                                                       \
    static constexpr uint64_t value = offsetof(type, last) + sizeof(type::last); \
  }
DETKERN_FIRST_SIZE(detkern_capabilities, name);
DETKERN_FIRST_SIZE(detkern_device, driver);
DETKERN_FIRST_SIZE(detkern_gemm_descriptor, scratch_bytes);
DETKERN_FIRST_SIZE(detkern_block_scaled_descriptor, stream);
DETKERN_FIRST_SIZE(detkern_column_sum_descriptor, stream);
DETKERN_FIRST_SIZE(detkern_row_descriptor, stream);
DETKERN_FIRST_SIZE(detkern_logp_descriptor, stream);
#undef DETKERN_FIRST_SIZE

constexpr uint64_t MAX_SIZE = 1 << 20;  // of a struct of any later detkern: a wild size is not read through

inline uint64_t size_of(const void* given) {
  uint64_t size = 0;
  if (given) std::memcpy(&size, given, sizeof size);
  return size;
}

template <class D>
int32_t check_size(const void* given) {
  const unsigned long long size = size_of(given), least = FirstSize<D>::value;
  if (size < least || size > MAX_SIZE)
    return fail(DETKERN_INVALID, "a struct of %llu bytes; it has at least %llu", size, least);
  return DETKERN_OK;
}

// function(descriptor, more...) with the caller's descriptor as this library's struct, whatever its size.
template <class D, class... More>
int32_t with_descriptor(int32_t (*function)(const D*, More...), const void* given, More... more) {
  const uint64_t size = size_of(given);
  if (size == sizeof(D)) return function(static_cast<const D*>(given), more...);
  if (const int32_t status = check_size<D>(given)) return status;
  const char* bytes = static_cast<const char*>(given);
  for (uint64_t i = sizeof(D); i < size; ++i)
    if (bytes[i])
      return fail(DETKERN_UNSUPPORTED,
                  "the library's descriptor has %zu bytes, and what is behind them is not zero; rebuild the library",
                  sizeof(D));
  D own{};
  std::memcpy(&own, given, std::min<uint64_t>(size, sizeof(D)));
  own.size = sizeof(D);
  return function(&own, more...);
}

// Fills in the caller's struct as far as both sides know it.
template <class D>
int32_t answer(D made, D* given) {
  if (const int32_t status = check_size<D>(given)) return status;
  made.size = given->size;
  std::memcpy(given, &made, std::min<uint64_t>(given->size, sizeof(D)));
  return DETKERN_OK;
}

inline int32_t unknown_operation(uint32_t operation) {
  return fail(DETKERN_UNSUPPORTED, "there is no kernel for operation %u", operation);
}

// detkern_offers of a library whose offers are a table.
inline int32_t list_offers(const detkern_offer* table, uint64_t size, detkern_offer* offers, uint64_t capacity,
                           uint64_t* count) {
  std::copy_n(table, std::min(size, capacity), offers);
  *count = size;
  return DETKERN_OK;
}

// A set of types, detkern_offer::dtypes.
template <class... Types>
constexpr uint64_t types(Types... dtypes) {
  return ((uint64_t(1) << dtypes) | ...);
}

// The types that products by a contract take, by a table of offers.
template <size_t N>
uint64_t gemm_types(const detkern_offer (&table)[N], int32_t contract) {
  for (const detkern_offer& offer : table)
    if (offer.operation == DETKERN_OPERATION_GEMM && int64_t(offer.variant) == contract) return offer.dtypes;
  return 0;
}

// DETKERN_OK where the library can take the descriptor, all but its pointers; `taken`: the types that it takes by the
// contract; `empty`: there is no output element.
inline int32_t check_gemm_sizes(const detkern_gemm_descriptor* d, uint64_t taken, bool& empty) {
  if (!taken) return fail(DETKERN_UNSUPPORTED, "gemm has no contract of code %d", d->contract);
  if (d->operand_dtype < 0 || d->operand_dtype > 63 || !(taken >> d->operand_dtype & 1))
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
inline int32_t check_gemm(const detkern_gemm_descriptor* d, uint64_t taken, bool& empty) {
  if (const int32_t status = check_gemm_sizes(d, taken, empty)) return status;
  if (!empty && (!d->out || (d->k && (!d->a || !d->b)) || (d->bias_dtype && !d->bias)))
    return fail(DETKERN_INVALID, "a null pointer where elements are");
  return DETKERN_OK;
}

// DETKERN_OK where the library can take the descriptor; `rows`: those of one batch index, 0 where there are none.
inline int32_t check_column_sum(const detkern_column_sum_descriptor* d, int64_t& rows) {
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
