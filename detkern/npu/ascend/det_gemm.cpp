// The Ascend library: the kernels and the C ABI's entry points.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>

#include "../../abi/checks.h"
#include "acl/acl.h"
#include "column_sum.h"
#include "gemm.h"

#ifndef DETKERN_LAUNCH
#define DETKERN_LAUNCH(kernel, blocks, stream, params) kernel<<<blocks, nullptr, stream>>>(params)
#endif
#ifndef DETKERN_HOST_MEMORY
#define DETKERN_HOST_MEMORY 0
#endif

namespace detkern {

template <int32_t CONTRACT, int32_t DTYPE>
__global__ __aicore__ void gemm_kernel(GemmParams params) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Gemm<CONTRACT, DTYPE> gemm(params);
  gemm.Process();
}

__global__ __aicore__ void column_sum_kernel(SumParams params) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ColumnSum sum(params);
  sum.Process();
}

namespace {

constexpr detkern_offer OFFERS[] = {
    {DETKERN_OPERATION_GEMM, DETKERN_FMA, types(DETKERN_F16, DETKERN_BF16)},
    {DETKERN_OPERATION_GEMM, DETKERN_TREE, types(DETKERN_F16, DETKERN_BF16)},
    {DETKERN_OPERATION_BIAS_GRADIENT, 0, types(DETKERN_F32, DETKERN_F16, DETKERN_BF16)},
};

int32_t failed(const char* what, aclError error) {
  const int32_t status = error == ACL_ERROR_RT_MEMORY_ALLOCATION ? DETKERN_OUT_OF_MEMORY : DETKERN_DEVICE_FAULT;
  const char* said = aclGetRecentErrMsg();
  return fail(status, "%s: error %d%s%.300s", what, static_cast<int>(error), said ? ": " : "", said ? said : "");
}

// Whoever loads the library without a framework has initialised nothing yet.
aclError initialise() {
  static const aclError error = [] {
    const aclError first = aclInit(nullptr);
    return first == ACL_ERROR_REPEAT_INITIALIZE ? ACL_SUCCESS : first;
  }();
  return error;
}

// Makes a device current, and the one before it again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error = initialise();
    if (error != ACL_SUCCESS) return;
    const bool had_one = aclrtGetDevice(&before_) == ACL_SUCCESS;
    if (had_one && before_ == device) return;
    error = aclrtSetDevice(device);
    restore_ = had_one && error == ACL_SUCCESS;
  }
  ~CurrentDevice() {
    if (restore_) aclrtSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  aclError error;

 private:
  int32_t before_ = 0;
  bool restore_ = false;
};

// How many blocks a launch has at most, and that the device computes infinities and NaN.
int32_t prepare(int device, int64_t& cores) {
  if (const aclError error = aclrtGetDeviceInfo(static_cast<uint32_t>(device), ACL_DEV_ATTR_VECTOR_CORE_NUM, &cores))
    return failed("aclrtGetDeviceInfo", error);
  aclrtFloatOverflowMode mode = ACL_RT_OVERFLOW_MODE_UNDEF;
  if (const aclError error = aclrtGetDeviceSatMode(&mode)) return failed("aclrtGetDeviceSatMode", error);
  if (mode != ACL_RT_OVERFLOW_MODE_INFNAN)
    return fail(DETKERN_UNSUPPORTED,
                "the device saturates on overflow; aclrtSetDeviceSatMode(ACL_RT_OVERFLOW_MODE_INFNAN) before its "
                "streams are made gives infinities and NaN");
  return DETKERN_OK;
}

int32_t tree_depth(int64_t leaves) {
  int32_t depth = 0;
  for (; leaves > 1; leaves -= leaves / 2) ++depth;
  return depth;
}

Operand operand(const void* array, int64_t row, int64_t col, const int64_t* batch, int rank, int64_t size) {
  Operand made{};
  made.address = reinterpret_cast<uint64_t>(array);
  made.row = row * size;
  made.col = col * size;
  for (int i = 0; i < rank; ++i) made.batch[i] = batch[i] * size;
  return made;
}

int32_t gemm(const detkern_gemm_descriptor* d) {
  bool empty = true;
  if (const int32_t status = check_gemm(d, gemm_types(OFFERS, d->contract), empty)) return status;
  if (empty) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  int64_t cores = 0;
  if (const int32_t status = prepare(d->device, cores)) return status;
  GemmParams p{};
  p.m = d->m;
  p.n = d->n;
  p.k = d->k;
  p.batch_rank = d->batch_rank;
  for (int i = 0; i < d->batch_rank; ++i) p.batch_shape[i] = d->batch_shape[i];
  const int64_t out_size = d->out_dtype == DETKERN_F32 ? 4 : 2, bias_size = d->bias_dtype == DETKERN_F32 ? 4 : 2;
  p.a = operand(d->a, d->a_row_stride, d->a_col_stride, d->a_batch_strides, d->batch_rank, 2);
  p.b = operand(d->b, d->b_row_stride, d->b_col_stride, d->b_batch_strides, d->batch_rank, 2);
  p.out = operand(d->out, d->out_row_stride, d->out_col_stride, d->out_batch_strides, d->batch_rank, out_size);
  p.bias = reinterpret_cast<uint64_t>(d->bias);
  p.bias_stride = d->bias_stride * bias_size;
  p.out_dtype = d->out_dtype;
  p.bias_dtype = d->bias_dtype;
  p.accumulate = d->accumulate;
  p.levels = d->contract == DETKERN_TREE ? tree_depth((d->k + LEAF - 1) / LEAF) : 0;
  for (p.rows = MAX_ROWS; p.rows > 1 && p.levels * p.rows * TILE_N * 2 > DETKERN_LEVEL_BYTES;) p.rows /= 2;
  int64_t batch = 1;
  for (int i = 0; i < d->batch_rank; ++i) batch *= d->batch_shape[i];
  p.tiles = batch * ((d->m + p.rows - 1) / p.rows) * ((d->n + TILE_N - 1) / TILE_N);
  const uint32_t blocks = static_cast<uint32_t>(std::min(p.tiles, cores));
  const aclrtStream stream = static_cast<aclrtStream>(d->stream);
  const bool f16 = d->operand_dtype == DETKERN_F16;
  if (d->contract == DETKERN_TREE) {
    const auto kernel = f16 ? gemm_kernel<DETKERN_TREE, DETKERN_F16> : gemm_kernel<DETKERN_TREE, DETKERN_BF16>;
    DETKERN_LAUNCH(kernel, blocks, stream, p);
  } else {
    const auto kernel = f16 ? gemm_kernel<DETKERN_FMA, DETKERN_F16> : gemm_kernel<DETKERN_FMA, DETKERN_BF16>;
    DETKERN_LAUNCH(kernel, blocks, stream, p);
  }
  if (const aclError error = aclrtGetLastError(ACL_RT_THREAD_LEVEL)) return failed("launch of gemm", error);
  return DETKERN_OK;
}

int32_t column_sum(const detkern_column_sum_descriptor* d) {
  SumParams p{};
  if (const int32_t status = check_column_sum(d, p.rows)) return status;
  if (d->n == 0) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  int64_t cores = 0;
  if (const int32_t status = prepare(d->device, cores)) return status;
  const int64_t size = d->operand_dtype == DETKERN_F32 ? 4 : 2, out_size = d->out_dtype == DETKERN_F32 ? 4 : 2;
  p.columns = d->n;
  p.row_stride = d->row_stride * size;
  p.col_stride = d->col_stride * size;
  p.out_stride = d->out_stride * out_size;
  for (int i = 0; i < d->batch_rank; ++i) {
    p.batch_shape[i] = d->batch_shape[i];
    p.batch_strides[i] = d->batch_strides[i] * size;
  }
  p.dc = reinterpret_cast<uint64_t>(d->dc);
  p.out = reinterpret_cast<uint64_t>(d->out);
  p.batch_rank = d->batch_rank;
  p.dtype = d->operand_dtype;
  p.out_dtype = d->out_dtype;
  p.accumulate = d->accumulate;
  const uint32_t blocks = static_cast<uint32_t>(std::min((d->n + TILE_N - 1) / TILE_N, cores));
  DETKERN_LAUNCH(column_sum_kernel, blocks, static_cast<aclrtStream>(d->stream), p);
  if (const aclError error = aclrtGetLastError(ACL_RT_THREAD_LEVEL)) return failed("launch of column_sum", error);
  return DETKERN_OK;
}

int32_t get_device(detkern_device* device) {
  if (const int32_t status = check_size<detkern_device>(device)) return status;
  detkern_device made{};
  made.index = device->index;
  const CurrentDevice current(device->index);
  if (current.error) return failed("aclrtSetDevice", current.error);
  int64_t cores = 0;
  const uint32_t index = static_cast<uint32_t>(device->index);
  if (const aclError error = aclrtGetDeviceInfo(index, ACL_DEV_ATTR_VECTOR_CORE_NUM, &cores))
    return failed("aclrtGetDeviceInfo", error);
  made.units = static_cast<int32_t>(cores);
  const char* name = aclrtGetSocName();
  std::snprintf(made.name, sizeof made.name, "%s", name ? name : "Ascend");
  int32_t major = 0, minor = 0, patch = 0;
  if (const aclError error = aclrtGetVersion(&major, &minor, &patch)) return failed("aclrtGetVersion", error);
  std::snprintf(made.driver, sizeof made.driver, "runtime %d.%d.%d", major, minor, patch);
  return answer(made, device);
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
  made.host_memory = DETKERN_HOST_MEMORY;
  std::snprintf(made.name, sizeof made.name, "ascend%s", DETKERN_HOST_MEMORY ? ", emulated" : "");
  return answer(made, capabilities);
}

int32_t detkern_offers(detkern_offer* offers, uint64_t capacity, uint64_t* count) {
  using namespace detkern;
  return list_offers(OFFERS, std::size(OFFERS), offers, capacity, count);
}

int32_t detkern_run(uint32_t operation, const void* descriptor) {
  using namespace detkern;
  last_error[0] = 0;
  switch (operation) {
    case DETKERN_OPERATION_GEMM: return with_descriptor(gemm, descriptor);
    case DETKERN_OPERATION_BIAS_GRADIENT: return with_descriptor(column_sum, descriptor);
    default: return unknown_operation(operation);
  }
}

int32_t detkern_scratch(uint32_t, const void*, uint64_t* bytes) {
  *bytes = 0;
  return DETKERN_OK;
}

int32_t detkern_device_count(int32_t* count) {
  using namespace detkern;
  last_error[0] = 0;
  *count = 0;
  if (const aclError error = initialise()) return failed("aclInit", error);
  uint32_t found = 0;
  if (const aclError error = aclrtGetDeviceCount(&found)) return failed("aclrtGetDeviceCount", error);
  *count = static_cast<int32_t>(found);
  return DETKERN_OK;
}

int32_t detkern_get_device(detkern_device* device) {
  detkern::last_error[0] = 0;
  return detkern::get_device(device);
}

int32_t detkern_allocate(int32_t device, uint64_t bytes, void** pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  if (const aclError error = aclrtMalloc(pointer, bytes ? bytes : 1, ACL_MEM_MALLOC_HUGE_FIRST))
    return failed("aclrtMalloc", error);
  return DETKERN_OK;
}

int32_t detkern_free(int32_t device, void* pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  if (const aclError error = aclrtFree(pointer)) return failed("aclrtFree", error);
  return DETKERN_OK;
}

int32_t detkern_copy(int32_t device, void* to, const void* from, uint64_t bytes, int32_t direction) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("aclrtSetDevice", current.error);
  if (const aclError error = aclrtSynchronizeDevice()) return failed("aclrtSynchronizeDevice", error);
  const aclrtMemcpyKind kind = direction == DETKERN_TO_DEVICE ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
  if (const aclError error = aclrtMemcpy(to, bytes, from, bytes, kind)) return failed("aclrtMemcpy", error);
  return DETKERN_OK;
}

}  // extern "C"
