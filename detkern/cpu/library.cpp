// The C ABI's entry points: check the descriptor, turn it into a job, run the contract. No exception leaves.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

#include "../abi/checks.h"
#include "environment.h"
#include "job.h"
#include "simd.h"

namespace detkern {
namespace {

struct Product {
  int contract;
  uint64_t dtypes;
  void (*run)(const Job&);
};

constexpr uint64_t HALVES = types(DETKERN_F16, DETKERN_BF16), FLOATS = HALVES | types(DETKERN_F32);
constexpr Product PRODUCTS[] = {
    {DETKERN_FMA, FLOATS, run_fma},   {DETKERN_MMA16, HALVES, run_mma16},           {DETKERN_MMA8, HALVES, run_mma8},
    {DETKERN_TREE, HALVES, run_tree}, {DETKERN_TREE_MMA16, HALVES, run_tree_mma16},
};

// The contracts of linear_logp.
constexpr Product LOGITS[] = {PRODUCTS[0], PRODUCTS[1]};
static_assert(LOGITS[0].contract == DETKERN_FMA && LOGITS[1].contract == DETKERN_MMA16);

constexpr uint32_t FIRST_ROW = DETKERN_ROW_SUM, LAST_ROW = DETKERN_ROW_CUMSUM_BACKWARD;

constexpr auto offers() {
  std::array<detkern_offer, std::size(PRODUCTS) + 2 + LAST_ROW - FIRST_ROW + 1 + 2 * std::size(LOGITS)> all{};
  size_t size = 0;
  for (const Product& product : PRODUCTS)
    all[size++] = {DETKERN_OPERATION_GEMM, uint32_t(product.contract), product.dtypes};
  all[size++] = {DETKERN_OPERATION_BLOCK_SCALED_GEMM, DETKERN_FP8_BLOCK128, types(DETKERN_E4M3, DETKERN_E5M2)};
  all[size++] = {DETKERN_OPERATION_BIAS_GRADIENT, 0, FLOATS};
  for (uint32_t kind = FIRST_ROW; kind <= LAST_ROW; ++kind) all[size++] = {DETKERN_OPERATION_ROWS, kind, FLOATS};
  for (const uint32_t operation : {DETKERN_OPERATION_LINEAR_LOGP, DETKERN_OPERATION_LINEAR_LOGP_DELTA})
    for (const Product& product : LOGITS) all[size++] = {operation, uint32_t(product.contract), product.dtypes};
  return all;
}

bool is_fp8(int dtype) { return dtype == DETKERN_E4M3 || dtype == DETKERN_E5M2; }

// The vector lanes run along B's columns.
void exchange_thin(Job& job) {
  if (job.b.outer * 2 > 2 * LANES || job.a.outer <= job.b.outer) return;
  std::swap(job.a, job.b);
  std::swap(job.out_row_stride, job.out_col_stride);
  job.bias.along_rows = !job.bias.along_rows;
}

template <class AnyJob>
int32_t run(void (*kernel)(const AnyJob&), const AnyJob& job) {
  FloatEnvironment environment;
  try {
    kernel(job);
    return DETKERN_OK;
  } catch (const std::bad_alloc&) {
    return fail(DETKERN_OUT_OF_MEMORY, "no memory for the scratch of %d threads", job.threads);
  } catch (const std::exception& error) {
    return fail(DETKERN_DEVICE_FAULT, "%s", error.what());
  } catch (...) {
    return fail(DETKERN_DEVICE_FAULT, "unknown exception");
  }
}

int32_t gemm(const detkern_gemm_descriptor* d) {
  const Product* product = std::find_if(std::begin(PRODUCTS), std::end(PRODUCTS),
                                        [&](const Product& known) { return known.contract == d->contract; });
  const bool known = product != std::end(PRODUCTS);
  bool empty;
  if (const int32_t status = check_gemm(d, known ? product->dtypes : 0, empty)) return status;
  if (empty) return DETKERN_OK;
  Job job{};
  const int64_t size = itemsize(d->operand_dtype), out_size = itemsize(d->out_dtype);
  job.batch_rank = d->batch_rank;
  for (int i = 0; i < d->batch_rank; ++i) {
    job.batch_shape[i] = d->batch_shape[i];
    job.a.batch_strides[i] = d->a_batch_strides[i] * size;
    job.b.batch_strides[i] = d->b_batch_strides[i] * size;
    job.out_batch_strides[i] = d->out_batch_strides[i] * out_size;
  }
  job.a.data = static_cast<const char*>(d->a);
  job.b.data = static_cast<const char*>(d->b);
  job.a.dtype = job.b.dtype = d->operand_dtype;
  job.a.outer = d->m;
  job.b.outer = d->n;
  job.a.outer_stride = d->a_row_stride * size;
  job.a.k_stride = d->a_col_stride * size;
  job.b.outer_stride = d->b_col_stride * size;
  job.b.k_stride = d->b_row_stride * size;
  job.k = d->k;
  job.out = static_cast<char*>(d->out);
  job.out_dtype = d->out_dtype;
  job.out_row_stride = d->out_row_stride * out_size;
  job.out_col_stride = d->out_col_stride * out_size;
  if (d->bias_dtype)
    job.bias = {static_cast<const char*>(d->bias), d->bias_dtype, d->bias_stride * itemsize(d->bias_dtype), false};
  job.accumulate = d->accumulate != 0;
  job.threads = d->threads;
  exchange_thin(job);
  return run(product->run, job);
}

int32_t block_scaled_gemm(const detkern_block_scaled_descriptor* d) {
  if (!is_fp8(d->a_dtype) || !is_fp8(d->b_dtype))
    return fail(DETKERN_UNSUPPORTED, "operands of types %d and %d are not both fp8", d->a_dtype, d->b_dtype);
  if (!is_output_type(d->out_dtype))
    return fail(DETKERN_UNSUPPORTED, "out_dtype %d is not f32, f16 or bf16", d->out_dtype);
  if (d->accumulate && d->out_dtype != DETKERN_F32) return fail(DETKERN_INVALID, "accumulate needs an f32 out");
  if (d->m < 0 || d->n < 0 || d->k < 0) return fail(DETKERN_INVALID, "negative m, n or k");
  if (d->k % 128) return fail(DETKERN_UNSUPPORTED, "k = %lld is not a multiple of 128", static_cast<long long>(d->k));
  if (d->m == 0 || d->n == 0) return DETKERN_OK;
  if (!d->out || (d->k && (!d->a || !d->b || !d->scale_a || !d->scale_b)))
    return fail(DETKERN_INVALID, "a null pointer where elements are");
  Job job{};
  job.a.data = static_cast<const char*>(d->a);
  job.b.data = static_cast<const char*>(d->b);
  job.a.dtype = d->a_dtype;
  job.b.dtype = d->b_dtype;
  job.a.outer = d->m;
  job.b.outer = d->n;
  job.a.outer_stride = d->a_row_stride;
  job.a.k_stride = d->a_col_stride;
  job.b.outer_stride = d->b_col_stride;
  job.b.k_stride = d->b_row_stride;
  job.a.scale = static_cast<const char*>(d->scale_a);
  job.b.scale = static_cast<const char*>(d->scale_b);
  job.a.scale_outer_stride = d->scale_a_row_stride * 4;
  job.a.scale_block_stride = d->scale_a_col_stride * 4;
  job.b.scale_outer_stride = d->scale_b_col_stride * 4;
  job.b.scale_block_stride = d->scale_b_row_stride * 4;
  job.k = d->k;
  job.out = static_cast<char*>(d->out);
  job.out_dtype = d->out_dtype;
  job.out_row_stride = d->out_row_stride * itemsize(d->out_dtype);
  job.out_col_stride = d->out_col_stride * itemsize(d->out_dtype);
  job.accumulate = d->accumulate != 0;
  job.threads = d->threads;
  exchange_thin(job);
  return run(run_fp8_block128, job);
}

int32_t column_sum(const detkern_column_sum_descriptor* d) {
  SumJob job{};
  if (const int32_t status = check_column_sum(d, job.rows)) return status;
  if (d->n == 0) return DETKERN_OK;
  const int64_t size = itemsize(d->operand_dtype);
  job.batch_rank = job.rows ? d->batch_rank : 0;
  job.batch_shape = d->batch_shape;
  for (int i = 0; i < d->batch_rank; ++i) job.batch_strides[i] = d->batch_strides[i] * size;
  job.dc = static_cast<const char*>(d->dc);
  job.dtype = d->operand_dtype;
  job.columns = d->n;
  job.row_stride = d->row_stride * size;
  job.col_stride = d->col_stride * size;
  job.out = static_cast<char*>(d->out);
  job.out_dtype = d->out_dtype;
  job.out_stride = d->out_stride * itemsize(d->out_dtype);
  job.accumulate = d->accumulate != 0;
  job.threads = d->threads;
  return run(run_column_sum, job);
}

RowOperand row_operand(const void* data, int dtype, int64_t row_stride, int64_t col_stride,
                       const int64_t* batch_strides, int batch_rank, bool one_a_row) {
  const int64_t size = itemsize(dtype);
  RowOperand operand{};
  operand.data = static_cast<char*>(const_cast<void*>(data));
  operand.dtype = dtype;
  operand.row_stride = row_stride * size;
  operand.col_stride = one_a_row ? 0 : col_stride * size;
  for (int i = 0; i < batch_rank; ++i) operand.batch_strides[i] = batch_strides[i] * size;
  return operand;
}

int32_t rows(const detkern_row_descriptor* d) {
  if (d->kind < DETKERN_ROW_SUM || uint32_t(d->kind) > LAST_ROW)
    return fail(DETKERN_UNSUPPORTED, "there is no row operation of code %d", d->kind);
  const bool two = d->kind >= DETKERN_ROW_MEAN_SQUARE_BACKWARD && d->kind <= DETKERN_ROW_LOG_SOFTMAX_BACKWARD;
  const bool reduces = d->kind <= DETKERN_ROW_MEAN_SQUARE;
  const bool spreads = d->kind >= DETKERN_ROW_SUM_BACKWARD && d->kind <= DETKERN_ROW_MEAN_SQUARE_BACKWARD;
  if (!is_output_type(d->a_dtype)) return fail(DETKERN_UNSUPPORTED, "a_dtype %d is not f32, f16 or bf16", d->a_dtype);
  if (two ? !is_output_type(d->b_dtype) : d->b_dtype != 0)
    return fail(DETKERN_UNSUPPORTED, "b_dtype %d of row operation %d", d->b_dtype, d->kind);
  if (!is_output_type(d->out_dtype))
    return fail(DETKERN_UNSUPPORTED, "out_dtype %d is not f32, f16 or bf16", d->out_dtype);
  if (d->m < 0 || d->n < 0) return fail(DETKERN_INVALID, "negative m or n");
  if (d->batch_rank < 0 || d->batch_rank > DETKERN_MAX_SUM_RANK)
    return fail(DETKERN_INVALID, "batch_rank %d is not in 0..%d", d->batch_rank, DETKERN_MAX_SUM_RANK);
  bool empty = d->m == 0 || (d->n == 0 && !reduces);
  for (int i = 0; i < d->batch_rank; ++i) {
    if (d->batch_shape[i] < 0) return fail(DETKERN_INVALID, "negative batch_shape");
    empty |= d->batch_shape[i] == 0;
  }
  if (empty) return DETKERN_OK;
  if (!d->out || (d->n && (!d->a || (two && !d->b))))
    return fail(DETKERN_INVALID, "a null pointer where elements are");
  RowJob job{};
  job.kind = d->kind;
  job.rows = d->m;
  job.columns = d->n;
  job.batch_rank = d->batch_rank;
  job.batch_shape = d->batch_shape;
  job.a = row_operand(d->a, d->a_dtype, d->a_row_stride, d->a_col_stride, d->a_batch_strides, d->batch_rank, spreads);
  if (two)
    job.b = row_operand(d->b, d->b_dtype, d->b_row_stride, d->b_col_stride, d->b_batch_strides, d->batch_rank, false);
  job.out = row_operand(d->out, d->out_dtype, d->out_row_stride, d->out_col_stride, d->out_batch_strides,
                        d->batch_rank, reduces);
  job.threads = d->threads;
  return run(d->kind >= DETKERN_ROW_CUMSUM ? run_prefix_sums : run_rows, job);
}

int32_t logp(const detkern_logp_descriptor* d, bool gradient) {
  const Product* product = std::find_if(std::begin(LOGITS), std::end(LOGITS),
                                        [&](const Product& known) { return known.contract == d->contract; });
  if (product == std::end(LOGITS))
    return fail(DETKERN_UNSUPPORTED, "linear_logp has no contract of code %d", d->contract);
  if (d->operand_dtype < 0 || d->operand_dtype > 63 || !(product->dtypes >> d->operand_dtype & 1))
    return fail(DETKERN_UNSUPPORTED, "contract %d does not take operands of type %d", d->contract, d->operand_dtype);
  if (d->bias_dtype && !is_output_type(d->bias_dtype))
    return fail(DETKERN_UNSUPPORTED, "bias_dtype %d is not f32, f16 or bf16", d->bias_dtype);
  if (gradient && !is_output_type(d->out_dtype))
    return fail(DETKERN_UNSUPPORTED, "out_dtype %d is not f32, f16 or bf16", d->out_dtype);
  if (d->target_size != 4 && d->target_size != 8)
    return fail(DETKERN_UNSUPPORTED, "targets of %d bytes are not int32 or int64", d->target_size);
  if (d->m < 0 || d->n < 0 || d->k < 0 || d->targets < 0) return fail(DETKERN_INVALID, "negative m, n, k or targets");
  if (d->start < 0 || d->n > d->vocabulary || d->start > d->vocabulary - d->n)
    return fail(DETKERN_INVALID, "columns %lld to %lld are not within a vocabulary of %lld",
                static_cast<long long>(d->start), static_cast<long long>(d->start + d->n),
                static_cast<long long>(d->vocabulary));
  if (d->m == 0 || (gradient && d->n == 0)) return DETKERN_OK;
  if (!d->state || (d->targets && !d->target) || (gradient && (!d->out || !d->grads)) ||
      (d->n && d->k && (!d->hidden || !d->weight)) || (d->n && d->bias_dtype && !d->bias))
    return fail(DETKERN_INVALID, "a null pointer where elements are");
  const int64_t size = itemsize(d->operand_dtype);
  LogpJob job{};
  Job& logits = job.product;
  logits.a.data = static_cast<const char*>(d->hidden);
  logits.b.data = static_cast<const char*>(d->weight);
  logits.a.dtype = logits.b.dtype = d->operand_dtype;
  logits.a.outer = d->m;
  logits.b.outer = d->n;
  logits.a.outer_stride = d->hidden_row_stride * size;
  logits.a.k_stride = d->hidden_col_stride * size;
  logits.b.outer_stride = d->weight_row_stride * size;
  logits.b.k_stride = d->weight_col_stride * size;
  logits.k = d->k;
  if (d->bias_dtype)
    logits.bias = {static_cast<const char*>(d->bias), d->bias_dtype, d->bias_stride * itemsize(d->bias_dtype), false};
  logits.threads = job.threads = d->threads;
  job.multiply = product->run;
  job.vocabulary = d->vocabulary;
  job.start = d->start;
  job.target = static_cast<const char*>(d->target);
  job.wide_targets = d->target_size == 8;
  job.target_row_stride = d->target_row_stride * d->target_size;
  job.target_col_stride = d->target_col_stride * d->target_size;
  job.targets = d->targets;
  job.ignore_index = d->ignore_index;
  job.entropy = d->entropy != 0;
  job.tau = d->tau;
  job.cap = d->cap;
  job.inverse = d->inverse;
  job.state = {static_cast<char*>(d->state), (d->dense & 1 ? d->m : d->state_line_stride) * 4, d->state_row_stride * 4};
  if (!gradient) return run(run_logp_fold, job);
  job.grads = {static_cast<char*>(const_cast<void*>(d->grads)), (d->dense & 2 ? d->m : d->grads_line_stride) * 4,
               d->grads_row_stride * 4};
  job.out = static_cast<char*>(d->out);
  job.out_dtype = d->out_dtype;
  job.out_row_stride = d->out_row_stride * itemsize(d->out_dtype);
  job.out_col_stride = d->out_col_stride * itemsize(d->out_dtype);
  return run(run_logp_delta, job);
}

}  // namespace
}  // namespace detkern

extern "C" {

int32_t detkern_abi_version(void) { return DETKERN_ABI_VERSION; }

const char* detkern_last_error(void) { return detkern::last_error; }

int32_t detkern_get_capabilities(detkern_capabilities* capabilities) {
  using namespace detkern;
  last_error[0] = 0;
  detkern_capabilities made{};
  made.abi_version = DETKERN_ABI_VERSION;
  made.host_memory = 1;
  std::snprintf(made.name, sizeof made.name, "cpu %s fma=%dx%d mma=%dx%d", INSTRUCTION_SET, FMA_ROWS, TILE_COLUMNS,
                MMA_ROWS, TILE_COLUMNS);
  return answer(made, capabilities);
}

int32_t detkern_offers(detkern_offer* offers, uint64_t capacity, uint64_t* count) {
  constexpr auto ALL = detkern::offers();
  return detkern::list_offers(ALL.data(), ALL.size(), offers, capacity, count);
}

int32_t detkern_run(uint32_t operation, const void* descriptor) {
  using namespace detkern;
  last_error[0] = 0;
  switch (operation) {
    case DETKERN_OPERATION_GEMM: return with_descriptor(gemm, descriptor);
    case DETKERN_OPERATION_BLOCK_SCALED_GEMM: return with_descriptor(block_scaled_gemm, descriptor);
    case DETKERN_OPERATION_BIAS_GRADIENT: return with_descriptor(column_sum, descriptor);
    case DETKERN_OPERATION_ROWS: return with_descriptor(rows, descriptor);
    case DETKERN_OPERATION_LINEAR_LOGP: return with_descriptor(logp, descriptor, false);
    case DETKERN_OPERATION_LINEAR_LOGP_DELTA: return with_descriptor(logp, descriptor, true);
    default: return unknown_operation(operation);
  }
}

int32_t detkern_scratch(uint32_t, const void*, uint64_t* bytes) {
  *bytes = 0;
  return DETKERN_OK;
}

int32_t detkern_device_count(int32_t* count) {
  *count = 1;
  return DETKERN_OK;
}

int32_t detkern_get_device(detkern_device* device) {
  using namespace detkern;
  last_error[0] = 0;
  if (const int32_t status = check_size<detkern_device>(device)) return status;
  if (device->index != 0) return fail(DETKERN_INVALID, "there is one CPU, not a number %d", device->index);
  detkern_device made{};
  made.units = int32_t(std::thread::hardware_concurrency());
  std::snprintf(made.name, sizeof made.name, "CPU, %s", INSTRUCTION_SET);
  return answer(made, device);
}

int32_t detkern_allocate(int32_t, uint64_t bytes, void** pointer) {
  using namespace detkern;
  last_error[0] = 0;
  *pointer = std::malloc(bytes ? bytes : 1);
  return *pointer ? int32_t(DETKERN_OK)
                  : fail(DETKERN_OUT_OF_MEMORY, "no memory for %llu bytes", static_cast<unsigned long long>(bytes));
}

int32_t detkern_free(int32_t, void* pointer) {
  std::free(pointer);
  return DETKERN_OK;
}

int32_t detkern_copy(int32_t, void* to, const void* from, uint64_t bytes, int32_t) {
  std::memmove(to, from, bytes);
  return DETKERN_OK;
}

}  // extern "C"
