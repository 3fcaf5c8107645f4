// The MUSA library: the kernels and the C ABI's entry points.
#include <musa_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <mutex>

#include "../../abi/checks.h"
#include "arithmetic.muh"
#include "column_sum.muh"
#include "gemm.muh"

#ifndef DETKERN_LAUNCH
#define DETKERN_LAUNCH(kernel, grid, threads, stream, params) kernel<<<grid, threads, 0, stream>>>(params)
#endif
#ifndef DETKERN_HOST_MEMORY
#define DETKERN_HOST_MEMORY 0
#endif

namespace detkern {
namespace {

constexpr detkern_offer OFFERS[] = {
    {DETKERN_OPERATION_GEMM, DETKERN_FMA, types(DETKERN_F32, DETKERN_F16, DETKERN_BF16)},
    {DETKERN_OPERATION_GEMM, DETKERN_TREE, types(DETKERN_F16, DETKERN_BF16)},
    {DETKERN_OPERATION_BIAS_GRADIENT, 0, types(DETKERN_F32, DETKERN_F16, DETKERN_BF16)},
};

int32_t failed(const char* what, musaError_t error) {
  const int32_t status = error == musaErrorMemoryAllocation ? DETKERN_OUT_OF_MEMORY : DETKERN_DEVICE_FAULT;
  return fail(status, "%s: %s", what, musaGetErrorString(error));
}

// Makes a device current, and the one before it again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error = musaGetDevice(&before_);
    if (error == musaSuccess && before_ != device) error = musaSetDevice(device);
    changed_ = error == musaSuccess && before_ != device;
  }
  ~CurrentDevice() {
    if (changed_) musaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  musaError_t error;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The number of multiprocessors, asked for once a device.
int32_t multiprocessors(int device, int& count) {
  constexpr int MOST = 64;
  static int known[MOST];
  static std::mutex lock;
  const std::lock_guard<std::mutex> guard(lock);
  if (device >= 0 && device < MOST && known[device]) {
    count = known[device];
    return DETKERN_OK;
  }
  musaDeviceProp properties;
  if (const musaError_t error = musaGetDeviceProperties(&properties, device))
    return failed("musaGetDeviceProperties", error);
  count = properties.multiProcessorCount;
  if (device >= 0 && device < MOST) known[device] = count;
  return DETKERN_OK;
}

struct Launch {
  bool large;     // 128 x 128 tiles
  int64_t tiles;
  unsigned grid;
  int levels;     // of waiting nodes
  uint64_t scratch_bytes;
};

int32_t plan(const detkern_gemm_descriptor* d, Launch& launch) {
  int units = 0;
  if (const int32_t status = multiprocessors(d->device, units)) return status;
  int64_t batch = 1;
  for (int i = 0; i < d->batch_rank; ++i) batch *= d->batch_shape[i];
  const auto tiles = [&](int64_t side) { return batch * ((d->m + side - 1) / side) * ((d->n + side - 1) / side); };
  launch.large = d->m > 64 && d->n > 64 && tiles(128) >= units;
  launch.tiles = tiles(launch.large ? 128 : 64);
  launch.grid = static_cast<unsigned>(std::min<int64_t>(launch.tiles, 4 * int64_t(units)));
  launch.levels = d->contract == DETKERN_TREE ? tree_depth((d->k + LEAF - 1) / LEAF) : 0;
  const uint64_t slot = (launch.large ? 64 : 16) * 2 * THREADS;
  launch.scratch_bytes = uint64_t(launch.grid) * launch.levels * slot;
  return DETKERN_OK;
}

template <int CONTRACT, int DTYPE>
void launch_kernel(const Launch& launch, musaStream_t stream, const GemmParams& params) {
  const auto kernel = launch.large ? gemm_kernel<CONTRACT, DTYPE, 8, 8> : gemm_kernel<CONTRACT, DTYPE, 4, 4>;
  DETKERN_LAUNCH(kernel, launch.grid, THREADS, stream, params);
}

int32_t gemm(const detkern_gemm_descriptor* d) {
  bool empty = true;
  if (const int32_t status = check_gemm(d, gemm_types(OFFERS, d->contract), empty)) return status;
  if (empty) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("musaSetDevice", current.error);
  Launch launch;
  if (const int32_t status = plan(d, launch)) return status;
  if (launch.scratch_bytes && (!d->scratch || d->scratch_bytes < launch.scratch_bytes))
    return fail(DETKERN_INVALID, "%llu bytes of scratch are needed, %llu were given",
                static_cast<unsigned long long>(launch.scratch_bytes),
                static_cast<unsigned long long>(d->scratch ? d->scratch_bytes : 0));
  GemmParams p{};
  p.m = d->m;
  p.n = d->n;
  p.k = d->k;
  p.tiles = launch.tiles;
  p.a_row = d->a_row_stride;
  p.a_col = d->a_col_stride;
  p.b_row = d->b_row_stride;
  p.b_col = d->b_col_stride;
  p.out_row = d->out_row_stride;
  p.out_col = d->out_col_stride;
  p.bias_stride = d->bias_stride;
  for (int i = 0; i < d->batch_rank; ++i) {
    p.batch_shape[i] = d->batch_shape[i];
    p.a_batch[i] = d->a_batch_strides[i];
    p.b_batch[i] = d->b_batch_strides[i];
    p.out_batch[i] = d->out_batch_strides[i];
  }
  p.a = d->a;
  p.b = d->b;
  p.bias = d->bias;
  p.out = d->out;
  p.scratch = d->scratch;
  p.batch_rank = d->batch_rank;
  p.out_dtype = d->out_dtype;
  p.bias_dtype = d->bias_dtype;
  p.accumulate = d->accumulate;
  p.levels = launch.levels;
  const musaStream_t stream = static_cast<musaStream_t>(d->stream);
  if (d->contract == DETKERN_TREE) {
    if (d->operand_dtype == DETKERN_F16) launch_kernel<DETKERN_TREE, DETKERN_F16>(launch, stream, p);
    if (d->operand_dtype == DETKERN_BF16) launch_kernel<DETKERN_TREE, DETKERN_BF16>(launch, stream, p);
  } else {
    if (d->operand_dtype == DETKERN_F32) launch_kernel<DETKERN_FMA, DETKERN_F32>(launch, stream, p);
    if (d->operand_dtype == DETKERN_F16) launch_kernel<DETKERN_FMA, DETKERN_F16>(launch, stream, p);
    if (d->operand_dtype == DETKERN_BF16) launch_kernel<DETKERN_FMA, DETKERN_BF16>(launch, stream, p);
  }
  if (const musaError_t error = musaGetLastError()) return failed("launch of gemm", error);
  return DETKERN_OK;
}

int32_t column_sum(const detkern_column_sum_descriptor* d) {
  SumParams p{};
  if (const int32_t status = check_column_sum(d, p.rows)) return status;
  if (d->n == 0) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("musaSetDevice", current.error);
  p.columns = d->n;
  p.row_stride = d->row_stride;
  p.col_stride = d->col_stride;
  p.out_stride = d->out_stride;
  for (int i = 0; i < d->batch_rank; ++i) {
    p.batch_shape[i] = d->batch_shape[i];
    p.batch_strides[i] = d->batch_strides[i];
  }
  p.dc = d->dc;
  p.out = d->out;
  p.batch_rank = d->batch_rank;
  p.dtype = d->operand_dtype;
  p.out_dtype = d->out_dtype;
  p.accumulate = d->accumulate;
  const auto kernel = column_sum_kernel;
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>((d->n + THREADS - 1) / THREADS, 65535));
  DETKERN_LAUNCH(kernel, grid, THREADS, static_cast<musaStream_t>(d->stream), p);
  if (const musaError_t error = musaGetLastError()) return failed("launch of column_sum", error);
  return DETKERN_OK;
}

int32_t gemm_scratch(const detkern_gemm_descriptor* d, uint64_t* bytes) {
  bool empty = true;
  if (const int32_t status = check_gemm_sizes(d, gemm_types(OFFERS, d->contract), empty)) return status;
  if (empty || d->contract != DETKERN_TREE) return DETKERN_OK;
  Launch launch;
  if (const int32_t status = plan(d, launch)) return status;
  *bytes = launch.scratch_bytes;
  return DETKERN_OK;
}

int32_t get_device(detkern_device* device) {
  if (const int32_t status = check_size<detkern_device>(device)) return status;
  detkern_device made{};
  made.index = device->index;
  musaDeviceProp properties;
  if (const musaError_t error = musaGetDeviceProperties(&properties, device->index))
    return failed("musaGetDeviceProperties", error);
  int driver = 0, runtime = 0;
  musaDriverGetVersion(&driver);
  musaRuntimeGetVersion(&runtime);
  made.units = properties.multiProcessorCount;
  std::snprintf(made.name, sizeof made.name, "%.127s", properties.name);
  std::snprintf(made.driver, sizeof made.driver, "driver %d, runtime %d", driver, runtime);
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
  std::snprintf(made.name, sizeof made.name, "musa%s", DETKERN_HOST_MEMORY ? ", emulated" : "");
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

int32_t detkern_scratch(uint32_t operation, const void* descriptor, uint64_t* bytes) {
  using namespace detkern;
  last_error[0] = 0;
  *bytes = 0;
  switch (operation) {
    case DETKERN_OPERATION_GEMM: return with_descriptor(gemm_scratch, descriptor, bytes);
    case DETKERN_OPERATION_BIAS_GRADIENT: return DETKERN_OK;
    default: return unknown_operation(operation);
  }
}

int32_t detkern_device_count(int32_t* count) {
  using namespace detkern;
  last_error[0] = 0;
  if (const musaError_t error = musaGetDeviceCount(count)) return failed("musaGetDeviceCount", error);
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
  if (current.error) return failed("musaSetDevice", current.error);
  if (const musaError_t error = musaMalloc(pointer, bytes ? bytes : 1)) return failed("musaMalloc", error);
  return DETKERN_OK;
}

int32_t detkern_free(int32_t device, void* pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("musaSetDevice", current.error);
  if (const musaError_t error = musaFree(pointer)) return failed("musaFree", error);
  return DETKERN_OK;
}

int32_t detkern_copy(int32_t device, void* to, const void* from, uint64_t bytes, int32_t direction) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("musaSetDevice", current.error);
  if (const musaError_t error = musaDeviceSynchronize()) return failed("musaDeviceSynchronize", error);
  const musaMemcpyKind kind = direction == DETKERN_TO_DEVICE ? musaMemcpyHostToDevice : musaMemcpyDeviceToHost;
  if (const musaError_t error = musaMemcpy(to, from, bytes, kind)) return failed("musaMemcpy", error);
  return DETKERN_OK;
}

}  // extern "C"
